"""Plans of a calibration: what they contain, and that models, checkpoints and serving take them."""

from __future__ import annotations

import pytest
import torch

import attnscale.hf
from attnscale._util.files import read_yaml, write_yaml
from attnscale.lab.calibration.growth import fit_growth
from attnscale.lab.calibration.heads import Head
from attnscale.lab.calibration.measuring import Measured, Place
from attnscale.lab.calibration.plans import calibrated_exponents, power_plan, table_plan
from attnscale.policies.record import find_record
from attnscale.serve.tables import LayerShape, beta_table, layer_policies

LAYER = "model.layers.1.self_attn"
EXPONENTS = {Place(LAYER, 0): 0.25, Place(LAYER, 1): -0.125}


def head(number: int, weight: float, exponent: float) -> Head:
    values = {
        n: [torch.full((4,), 0.5 * (n / 128) ** exponent) * (1 + i / 50) for i in range(4)] for n in (128, 256, 512)
    }
    return Head(Place(LAYER, number), "prompts", weight, fit_growth(values, draws=50), Measured())


def test_only_heads_that_retrieve_are_calibrated() -> None:
    heads = [head(0, 0.8, 0.25), head(1, 0.02, 0.5)]
    assert calibrated_exponents(heads) == {Place(LAYER, 0): pytest.approx(0.25)}


def test_heads_with_the_same_exponent_share_an_entry_and_tiny_exponents_are_left_out() -> None:
    places = {Place(LAYER, 0): 0.1, Place(LAYER, 1): 0.2, Place(LAYER, 2): 0.10001, Place(LAYER, 3): 0.004}
    plan = power_plan(places, 128)
    assert {key: law["exponent"] for key, law in plan["layers"]["1"]["heads"].items()} == {"0,2": 0.1, "1": 0.2}
    assert power_plan({Place(LAYER, 0): 0.0}, 128) == {"default": "constant", "layers": {}}


def test_the_table_continues_the_measurements_with_the_power_of_n() -> None:
    plan = table_plan([head(0, 0.8, 0.25), head(1, 0.02, 0.5)], 128, 4096)
    table = plan["layers"]["1"]["table"]
    assert list(table) == [128, 256, 512, 1024, 2048, 4096]
    assert [row[1] for row in table.values()] == [1.0] * 6
    assert table[4096][0] / table[512][0] == pytest.approx(8**0.25, rel=1e-3)


@pytest.mark.parametrize("kind", ["power", "table"])
def test_a_plan_survives_yaml_a_checkpoint_and_serving(model, tmp_path, kind) -> None:
    heads = [head(0, 0.8, 0.25), head(1, 0.02, 0.5)]
    plan = power_plan(EXPONENTS, 128) if kind == "power" else table_plan(heads, 128, 1024)
    write_yaml(tmp_path / "policy.yaml", plan)
    assert read_yaml(tmp_path / "policy.yaml") == plan
    n = torch.tensor([[[64, 128, 512, 1024]]])
    with attnscale.hf.apply(model, tmp_path / "policy.yaml") as handle:
        applied = handle.policies[LAYER](n)[0]
        tokens = torch.arange(1, 301)[None] % 250
        with torch.no_grad():
            logits = model(tokens).logits
        model.save_pretrained(tmp_path / "model")
    expected = [4**0.25, 4**-0.125] if kind == "power" else [4**0.25, 1.0]
    assert applied[:, 0].tolist() == applied[:, 1].tolist() == [1.0, 1.0]
    assert applied[:, 2].tolist() == pytest.approx(expected, rel=1e-3)
    loaded = attnscale.hf.load(tmp_path / "model")
    assert torch.equal(loaded.policies[LAYER](n)[0], applied)
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(tokens).logits, logits)
    record = find_record(loaded.model.config.to_dict())
    shapes = {path: LayerShape(num_heads=2, head_dim=32) for path in loaded.policies}
    table = beta_table(layer_policies(record, shapes, {})[LAYER], 1024)
    assert torch.equal(table[[63, 127, 511, 1023]].T, applied)
