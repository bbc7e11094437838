"""β of every published system, to the last bit of fp32, at the positions where implementations go wrong.

The numbers were computed with mpmath at 40 digits from the published formulas, independently of this package, and are
given to 17 digits. None of them is closer than a million fp64 roundings to the midpoint between two fp32 numbers. A
policy that computes in fp64 and rounds once must therefore give the correctly rounded fp32 number: no tolerance is
needed.
"""

from __future__ import annotations

import pytest
import torch

from attnscale.policies import build_policy

# Follow the position. qwen, llama4, inkling, ssmax, beam and dual_chunk use pos + 1; mistral, grok2, hypenet and swan
# use pos.
BY_POSITION = (
    """
position  qwen-2048            qwen-8192            llama4               mistral-16384        mistral-8192
0         1                    1                    1                    1                    1
1         1                    1                    1                    1                    1
1023      1                    1                    1                    1                    1
1024      1                    1                    1                    1                    1
1025      1                    1                    1                    1                    1
8190      1.1818021708196115   1                    1                    1                    1
8191      1.1818181818181818   1                    1.0693147180559945   1                    1
8192      1.1818341908624039   1.0000135461143417   1.0693147180559945   1                    1.0693147180559945
8193      1.1818501979527546   1.0000270905754078   1.0693147180559945   1                    1.0693147180559945
16383     1.2727272727272727   1.0769230769230769   1.109861228866811    1                    1.0693147180559945
16384     1.2727352774936475   1.0769298501869325   1.109861228866811    1.0693147180559945   1.109861228866811
16385     1.2727432817714948   1.0769366230374187   1.109861228866811    1.0693147180559945   1.109861228866811
127999    1.5423440258783715   1.3050603295893913   1.2772588722239781   1.2079441541679836   1.2772588722239781
128000    1.5423450505157333   1.3050611965902359   1.2772588722239781   1.2079441541679836   1.2772588722239781
128001    1.5423460751450902   1.3050620635843071   1.2772588722239781   1.2079441541679836   1.2772588722239781
1048576   1.8181819432600501   1.5384616442969654   1.4859812404361672   1.4174387269895637   1.4859812404361672
""",
    """
position  grok2                inkling              hypenet              swan                 ssmax
0         1                    1                    1                    1                    0.34657359027997265
1         1                    1                    1.0003215009910569   1.0001446924931062   0.34657359027997265
1023      1                    1                    1.1792275935719514   1.1019986275902682   3.4657359027997265
1024      1                    1                    1.1793332129997631   1.1020701693892538   3.4662239457862543
1025      1.0001408194392808   1                    1.1794387631462136   1.1021416758502291   3.4667115128653574
8190      1.2999647736528371   1                    1.4594529654351293   1.3211051704620371   4.505395634757801
8191      1.2999823879015726   1                    1.459471481192873    1.3211209220345787   4.5054566736396445
8192      1.3                  1                    1.4594899948202873   1.3211366718934096   4.5055177050709073
8193      1.3000176099486443   1                    1.4595085063178624   1.3211524200389025   4.5055787290534082
16383     1.399991194219542    1                    1.5663196010619794   1.4133749100561887   4.8520302639196172
16384     1.4                  1                    1.5663291317394184   1.4133832377708227   4.8520607805664575
16385     1.4000088052430122   1                    1.5663386618523942   1.4133915650064257   4.85209129535088
127999    1.6965773013563052   1                    1.8929071978283889   1.7035287812207697   5.8798927714508771
128000    1.6965784284662087   1.0000007812469483   1.8929084500604404   1.703529903433083    5.8798966776856184
128001    1.6965795555673067   1.0000015624877931   1.8929097022827468   1.7035310256366969   5.8799005838898426
1048576   2.0                  1.2103159021971014   2.2307794981032096   2.0070046304679935   6.9314722824363839
""",
    """
position  beam                 dual_chunk
0         1.0000488173994806   1
1         1.0000976133611797   1
1023      1.0413797439924106   1
1024      1.0414136381079566   1
1025      1.0414475222982705   1
8190      1.17460747169578     1
8191      1.174618943088019    1
8192      1.1746304134720745   1.0000122062862526
8193      1.1746418828481335   1.0000244110827527
16383     1.2457309396155173   1.0693147180559945
16384     1.2457376979734129   1.0693208213853626
16385     1.2457444560013364   1.0693269243422471
127999    1.5145282291871653   1.2748872195622465
128000    1.5145293937748472   1.2748880008091948
128001    1.5145305583544697   1.2748887820500396
1048576   1.8664303067997605   1.4852031217593479
""",
)

# Follow the number of visible keys, here n = position + 1. Where ln n occurs, β(1) is defined as β(2).
BY_VISIBLE = (
    """
position  su_entropy           infoscale            lumina
0         0.11111111111111111  0.31791604678230367  0.30151134457776362
1         0.11111111111111111  0.31791604678230367  0.30151134457776362
1023      1.1111111111111111   0.95844320521319757  0.95346258924559232
1024      1.1112675771547565   0.95850364098114741  0.95352971991594608
1025      1.111423890623006    0.95856401217075834  0.95359678040597498
8190      1.4444248754461918   1.0759020370841549   1.0871072489959817
8191      1.4444444444444444   1.0759083471588446   1.087114613009218
8192      1.4444640110540492   1.0759146564022398   1.0871219760737081
8193      1.444483575275589    1.0759209648145521   1.0871293381896906
16383     1.5555555555555556   1.1107856941119491   1.1281521496355324
16384     1.5555653391589025   1.1107886843065527   1.1281556973634656
16385     1.5555751221651603   1.1107916743049146   1.128159244863727
127999    1.8850871427402319   1.2043908266077827   1.2419114404330011
128000    1.8850883950747852   1.2043911576512455   1.2419118529572593
128001    1.8850896473995547   1.2043914886919503   1.2419122654781578
1048576   2.2222223750956168   1.2877586926500211   1.3483997713067331
""",
    """
position  rem                  simplex              sphere
0         1.1774100225154747   1.3862943611198906   1.8186318987027145
1         1.1774100225154747   1.3862943611198906   1.8590938410959275
1023      3.7232974110590341   13.862943611198906   2.2662607767433809
1024      3.7235595581573577   13.864895783145017   2.2663310021284062
1025      3.723821431199599    13.86684605146143    2.2664011612071699
8190      4.2451834517522566   18.021582539031204   2.4209048617771128
8191      4.2452122084247541   18.021826694558578   2.4209142439747098
8192      4.2452409613923718   18.022070820283629   2.4209236250634428
8193      4.2452697106560418   18.022314916213633   2.4209330050435782
16383     4.4054649080066985   19.408121055678469   2.4747761017527943
16384     4.4054787619810211   19.40824312226583    2.4747808967966972
16385     4.4054926150662788   19.40836518140352    2.4747856915572505
127999    4.8496980406828948   23.519571085803508   2.6416693307474526
128000    4.8496996516013725   23.519586710742474   2.6416699859208998
128001    4.8497012625067299   23.51960233555937    2.6416706410893911
1048576   5.2655378765844554   27.725889129745536   2.8240668534195998
""",
    """
position  pippo
0         0.3989886289378332
1         0.3989886289378332
1023      1.2617128279513209
1024      1.2618016616705351
1025      1.2618904025204358
8190      1.4385642151962824
8191      1.4385739599624329
8192      1.4385837034731116
8193      1.4385934457286346
16383     1.4928787507040508
16384     1.492883445396736
16385     1.4928881397881442
127999    1.6434159171505888
128000    1.6434164630421155
128001    1.6434170089291961
1048576   1.7843314544836478
""",
)

DUAL_CHUNK = {"name": "dual_chunk", "original_length": 8192}
PRESETS = {
    "qwen-2048": {"name": "qwen"},
    "qwen-8192": {"name": "qwen", "reference_length": 8192},
    "llama4": {"name": "llama4"},
    "mistral-16384": {"name": "mistral"},
    "mistral-8192": {"name": "mistral", "floor_length": 8192},
    "grok2": {"name": "grok2"},
    "inkling": {"name": "inkling"},
    "hypenet": {"name": "hypenet"},
    "swan": {"name": "swan", "a": 1000},
    "ssmax": {"name": "ssmax", "num_heads": 1, "init": 0.5},  # 0.5 is exact in fp32, 1/ln 2048 is not
    "beam": {"name": "beam"},
    "dual_chunk": DUAL_CHUNK,
    "pippo": {"name": "pippo"},
    "su_entropy": {"name": "su_entropy"},
    "infoscale": {"name": "infoscale", "head_dim": 64, "reference_length": 2048},
    "lumina": {"name": "lumina", "reference_length": 2048},
    "rem": {"name": "rem"},
    "simplex": {"name": "simplex", "rho": 0.5},
    "sphere": {"name": "sphere", "head_dim": 64},
}

# The same number for every row.
UNIFORM = {
    "yarn-4": ({"name": "yarn", "factor": 4}, 1.2964769927807061808),
    "yarn-32": ({"name": "yarn", "factor": 32}, 1.8132604340394956656),
    "yarn-shorter": ({"name": "yarn", "factor": 0.5}, 1.0),
    "gpt_oss": ({"name": "gpt_oss"}, 1.8132604340394956656),
    "deepseek-v3": ({"name": "deepseek"}, 1.8738542070926265875),
    "deepseek-0.707": ({"name": "deepseek", "mscale": 0.707}, 1.5896261651208735109),
    "longrope": ({"name": "longrope", "factor": 32, "original_length": 4096}, 1.4166666666666666667),
    "drope-0.412": ({"name": "drope", "factor": 4}, 1.571153276781394935),
    "dual_chunk-prefill": (DUAL_CHUNK | {"prompt_length": 128_000}, 1.2748872195622465),
    "dual_chunk-short": (DUAL_CHUNK | {"prompt_length": 8192}, 1.0),
    "drope-0.103": ({"name": "drope", "factor": 4, "coefficient": 0.103}, 1.1427883191953487337),
}


def parse(tables: tuple[str, ...]) -> dict[str, dict[int, float]]:
    """Column → position → β."""
    columns: dict[str, dict[int, float]] = {}
    for table in tables:
        header, *rows = (line.split() for line in table.strip().splitlines())
        for index, name in enumerate(header[1:], start=1):
            columns[name] = {int(row[0]): float(row[index]) for row in rows}
    return columns


POSITION_VALUES = parse(BY_POSITION)
VISIBLE_VALUES = parse(BY_VISIBLE)
ALL_VALUES = POSITION_VALUES | VISIBLE_VALUES
POSITIONS = torch.tensor(list(ALL_VALUES["llama4"]))


def expected(column: dict[int, float]) -> torch.Tensor:
    return torch.tensor(list(column.values()), dtype=torch.float64).to(torch.float32)


def assert_same_bits(beta: torch.Tensor, target: torch.Tensor) -> None:
    torch.testing.assert_close(beta.detach().reshape(target.shape), target, rtol=0, atol=0)


def beta_at(position: int, **spec: object) -> float:
    return build_policy(spec)(position + 1).item()


@pytest.mark.parametrize("position", POSITIONS.tolist())
@pytest.mark.parametrize("preset", ALL_VALUES)
def test_beta_of_one_row_is_the_published_number(preset: str, position: int) -> None:
    beta = build_policy(PRESETS[preset])(position + 1)
    assert_same_bits(beta, expected({position: ALL_VALUES[preset][position]}))


@pytest.mark.parametrize("preset", ALL_VALUES)
def test_beta_of_many_rows_is_the_published_number(preset: str) -> None:
    assert_same_bits(build_policy(PRESETS[preset])(POSITIONS + 1), expected(ALL_VALUES[preset]))


@pytest.mark.parametrize("preset", POSITION_VALUES)
def test_under_a_sliding_window_a_position_preset_follows_the_position(preset: str) -> None:
    visible = (POSITIONS + 1).clamp(max=512)
    assert_same_bits(build_policy(PRESETS[preset])(visible, positions=POSITIONS), expected(POSITION_VALUES[preset]))


@pytest.mark.parametrize("preset", VISIBLE_VALUES)
def test_under_a_sliding_window_a_length_preset_follows_the_visible_keys(preset: str) -> None:
    beta = build_policy(PRESETS[preset])(POSITIONS + 1, positions=POSITIONS + 100_000)
    assert_same_bits(beta, expected(VISIBLE_VALUES[preset]))


@pytest.mark.parametrize("preset", UNIFORM)
def test_beta_of_a_length_ratio_is_the_published_number_for_every_row(preset: str) -> None:
    spec, value = UNIFORM[preset]
    policy = build_policy(spec)
    target = torch.full(POSITIONS.shape, value, dtype=torch.float64).to(torch.float32)
    assert_same_bits(policy(POSITIONS + 1), target)
    assert_same_bits(policy(POSITIONS + 1, positions=POSITIONS + 7), target)
    assert policy.uniform == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize("preset", ["ssmax", "su_entropy", "infoscale", "lumina", "rem", "simplex"])
def test_one_visible_key_has_the_beta_of_two_where_ln_n_occurs(preset: str) -> None:
    policy = build_policy(PRESETS[preset])
    assert policy(1).item() == policy(2).item() > 0


def test_the_sphere_has_no_logarithm_and_so_tells_one_key_from_two() -> None:
    policy = build_policy("sphere", head_dim=64)
    assert policy(1).item() < policy(2).item()


def test_deepseek_v3_is_1_8739() -> None:
    assert round(build_policy("deepseek").uniform, 4) == 1.8739


def test_gpt_oss_is_1_81326() -> None:
    assert round(build_policy("gpt_oss").uniform, 5) == 1.81326


@pytest.mark.parametrize("length", [2048, 8192])
def test_qwen_is_exactly_one_up_to_its_reference_length_and_above_one_after(length: int) -> None:
    policy = build_policy("qwen", reference_length=length)
    assert (policy(torch.arange(1, length + 1)) == 1.0).all()
    assert policy(length + 1).item() > 1.0


def test_llama4_steps_at_position_8191() -> None:
    assert beta_at(8190, name="llama4") == 1.0
    assert beta_at(8191, name="llama4") == beta_at(8192, name="llama4") == pytest.approx(1.0693147180559945)


def test_llama4_is_level_between_its_steps() -> None:
    level = build_policy("llama4")(torch.arange(8192, 16384))
    assert (level == level[0]).all()
    assert beta_at(16383, name="llama4") > level[0].item()


def test_mistral_steps_at_position_16384_and_not_at_16383() -> None:
    assert beta_at(16383, name="mistral") == 1.0
    assert beta_at(16384, name="mistral") == pytest.approx(1.0693147180559945)


def test_mistral_steps_one_position_after_llama4_at_the_same_length() -> None:
    assert beta_at(8191, name="llama4") > beta_at(8191, name="mistral", floor_length=8192)
    assert beta_at(8192, name="llama4") == beta_at(8192, name="mistral", floor_length=8192)


def test_grok2_is_one_up_to_and_including_position_1024() -> None:
    assert (build_policy("grok2")(torch.arange(1, 1026)) == 1.0).all()
    assert beta_at(1025, name="grok2") > 1.0


def test_inkling_is_one_for_the_first_128000_tokens() -> None:
    assert beta_at(127_999, name="inkling") == 1.0
    assert beta_at(128_000, name="inkling") > 1.0


@pytest.mark.parametrize("name", ["hypenet", "swan"])
def test_the_first_token_of_a_shifted_logarithm_has_beta_one(name: str) -> None:
    assert beta_at(0, name=name, a=777) == 1.0


@pytest.mark.parametrize("n", [1, 2, 1025, 2**20 + 1])
def test_in_three_dimensions_the_sphere_is_half_the_number_of_keys(n: int) -> None:
    # C_3 = 1/2 and the exponent is 1: a cap of height t covers the fraction t/2 of the sphere.
    assert build_policy("sphere", head_dim=3)(n).item() == n / 2


def test_random_energy_scales_with_t_and_inversely_with_sigma() -> None:
    target = torch.tensor(1.0613030521061885, dtype=torch.float64).to(torch.float32)
    assert_same_bits(build_policy("rem", sigma=2.0, t=0.5)(8192), target)


@pytest.mark.parametrize("name", ["su_entropy", "lumina"])
def test_beta_is_one_at_the_reference_length(name: str) -> None:
    assert build_policy(name, reference_length=3000)(3000).item() == 1.0


def test_infoscale_is_close_to_lumina_for_a_large_head_dimension() -> None:
    n = torch.tensor([2, 300, 2048, 10**6])
    infoscale = build_policy("infoscale", head_dim=2**40, reference_length=2048)(n)
    torch.testing.assert_close(infoscale, build_policy("lumina", reference_length=2048)(n), rtol=1e-6, atol=0)
