"""Which problems become events, when they begin and end, and what a run can do about them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import pytest
import tiny_gpt
import torch

from attnscale import Monitor, ScaledDotProductAttention
from attnscale.diagnostics import Event, EventLog, MemorySink, Record, Summary, Thresholds, actions
from attnscale.diagnostics.actions import RunStopped
from attnscale.diagnostics.events import CAUSES
from attnscale.errors import ArgumentError, ArgumentTypeError

LAYERS, HEADS = ("blocks.0", "blocks.1", "blocks.2"), 4
HEALTHY = {
    "max_logit": 3.0,
    "relative_entropy": 0.8,
    "w_max": 0.2,
    "first_share": 0.1,
    "beta": 1.0,
    "visible": 100.0,
    "value_size": 0.5,
    "output_gradient": 0.01,
    "score_gain": 0.1,
    "token_angle": 0.8,
    "mismatch": 0.0,
}
ROWS = ("max_logit", "relative_entropy", "w_max", "first_share", "beta", "visible")
Change = Callable[[str, int, int], dict[str, float]]  # layer, head, step


def record(layer: str, head: int, step: int, **values: float) -> Record:
    numbers = HEALTHY | values
    forward = {name: Summary(*[numbers[name]] * 6, rows=64) for name in ROWS}
    return Record(step, layer, head, forward, {}, {name: x for name, x in numbers.items() if name not in ROWS})


def play(change: Change, reports: int = 30, limits: Thresholds | None = None, every: int = 10) -> list[Event]:
    """The events of a run of three layers with four heads each."""
    log, sent = EventLog(limits), []
    for step in range(0, reports * every, every):
        report = [record(x, head, step, **change(x, head, step)) for x in LAYERS for head in range(HEADS)]
        sent += log.update(step, report)
    return sent


def since(start: int, layer: str | None = None, head: int | None = None, **values: float) -> Change:
    """Values of some heads from a step on."""

    def change(of_layer: str, of_head: int, step: int) -> dict[str, float]:
        here = layer in (None, of_layer) and head in (None, of_head)
        return values if here and step >= start else {}

    return change


def only(events: list[Event]) -> Event:
    """The first message of the only event."""
    assert len({event.number for event in events}) == 1, [event.message for event in events]
    return events[0]


def test_a_healthy_run_has_no_events():
    assert play(lambda *_: {}) == []


@pytest.mark.parametrize("every", [1, 10, 50])
def test_logits_that_grow_as_the_model_learns_are_no_event(every):
    assert play(lambda layer, head, step: {"max_logit": 0.2 + 12 * (1 - math.exp(-step / 100))}, 60, every=every) == []


def test_an_untrained_model_that_attends_to_everything_is_no_event():
    assert play(lambda *_: {"max_logit": 0.1, "relative_entropy": 0.9995, "w_max": 0.01}) == []


def test_a_sharp_head_is_no_event():
    """Heads that attend to the previous token are sharp in healthy models."""
    assert play(since(0, "blocks.1", 2, w_max=0.99, relative_entropy=0.02, max_logit=30.0)) == []


def test_heads_that_grow_sharp_on_the_first_keys_are_sinks_and_no_event():
    assert play(since(100, w_max=0.97, relative_entropy=0.05, first_share=0.98)) == []


def test_tokens_that_are_almost_parallel_while_gradients_reach_all_layers_are_no_event():
    """Early in training a model learns the mean of its tokens first."""
    assert play(lambda x, h, s: {"token_angle": 1e-4} if x != "blocks.0" and s < 100 else {}) == []


def test_a_head_that_was_never_much_focused_and_grows_broader_is_no_event():
    assert play(lambda x, h, s: {"relative_entropy": 0.93 if s < 100 else 0.995}) == []


PROBLEMS: dict[str, tuple[Change, str | None]] = {
    "logit_jump": (since(150, "blocks.1", 2, max_logit=90.0), "jump"),
    "logit_drop": (since(150, "blocks.1", 2, max_logit=0.003, relative_entropy=0.99999), "jump"),
    "exploding": (lambda x, h, s: {"max_logit": 3 * 1.2 ** (s / 10)} if (x, h) == ("blocks.1", 2) else {}, "exploding"),
    "dead_values": (since(150, "blocks.1", 2, value_size=0.0, score_gain=0.0), "dead"),
    "dead_output": (since(150, "blocks.1", 2, output_gradient=0.0), "dead"),
    "vanishing": (since(150, "blocks.1", 2, score_gain=1e-8), "vanishing"),
    "diffuse": (since(150, "blocks.1", 2, relative_entropy=0.995), "diffuse"),
    "mismatch": (since(150, "blocks.1", 2, mismatch=0.3), "mismatch"),
    "nan": (since(150, "blocks.1", 2, broken_row=7, broken_call=3, broken_origin=2, max_logit=math.nan), None),
    "temperature": (since(0, beta=0.01, relative_entropy=0.9999, max_logit=0.01), "temperature"),
    "collapse": (since(150, w_max=0.99, relative_entropy=0.01), "collapsed"),
    "divergence": (since(150, w_max=0.99, relative_entropy=0.1, max_logit=200.0, value_size=5.0), "collapsed"),
    "rank_collapse": (
        lambda x, h, s: {
            "token_angle": {"blocks.0": 0.9, "blocks.1": 1e-4, "blocks.2": 1e-6}[x],
            "output_gradient": {"blocks.0": 1e-9, "blocks.1": 1e-6, "blocks.2": 1e-2}[x],
            "score_gain": 1e-7,
        },
        "rank",
    ),
}


def test_every_cause_is_tried():
    assert set(PROBLEMS) == set(CAUSES)


@pytest.mark.parametrize("cause", PROBLEMS)
def test_each_problem_is_one_event_with_its_cause_place_and_first_step(cause):
    event = only(play(PROBLEMS[cause][0]))
    assert (event.cause, event.status) == (cause, "begun")
    assert event.advice == CAUSES[cause].advice
    if cause in ("temperature", "rank_collapse"):
        assert event.start == 0
    elif cause != "exploding":
        assert event.start == 150
        assert event.step <= 160
    if cause not in ("temperature", "collapse", "divergence", "rank_collapse"):
        assert event.places == (("blocks.1", (2,)),)
        assert "head 2 of blocks.1" in event.message
    elif cause == "rank_collapse":
        assert [layer for layer, _ in event.places] == ["blocks.1", "blocks.2"]
    else:
        assert event.places == tuple((layer, (0, 1, 2, 3)) for layer in LAYERS)


@pytest.mark.parametrize("cause", [cause for cause, (_, limit) in PROBLEMS.items() if limit])
def test_each_limit_can_be_switched_off(cause):
    change, limit = PROBLEMS[cause]
    events = play(change, limits=Thresholds(**{limit: None}))
    assert cause not in {event.cause for event in events}


def test_a_whole_layer_is_one_event():
    event = only(play(since(150, "blocks.1", max_logit=90.0, relative_entropy=0.1)))
    assert event.places == (("blocks.1", (0, 1, 2, 3)),)
    assert "all heads of blocks.1" in event.message


def test_a_lasting_problem_must_be_seen_twice():
    assert play(lambda x, h, s: {"value_size": 0.0} if (x, h, s) == ("blocks.1", 2, 150) else {}) == []
    once = Thresholds(seen=1)
    begun, over = play(lambda x, h, s: {"value_size": 0.0} if (x, h, s) == ("blocks.1", 2, 150) else {}, limits=once)
    assert (begun.status, begun.step, over.status, over.step) == ("begun", 150, "over", 180)
    assert begun.number == over.number


def test_an_event_that_returns_before_it_is_over_is_still_the_same():
    """Two quiet reports are not enough to end an event."""
    events = play(lambda x, h, s: {"score_gain": 1e-8} if x == "blocks.1" and s >= 100 and s % 30 != 0 else {})
    assert [event.status for event in events] == ["begun"]


def test_a_second_problem_after_the_end_of_the_first_is_another_event():
    events = play(lambda x, h, s: {"score_gain": 1e-8} if x == "blocks.1" and s in (50, 60, 200, 210) else {})
    assert [(event.number, event.status, event.start) for event in events] == [
        (0, "begun", 50),
        (0, "over", 50),
        (1, "begun", 200),
        (1, "over", 200),
    ]


def test_an_event_that_spreads_is_sent_again():
    def change(layer: str, head: int, step: int) -> dict[str, float]:
        return {"score_gain": 1e-8} if step >= 100 + 50 * LAYERS.index(layer) else {}

    events = play(change)
    assert [(event.number, event.status) for event in events] == [(0, "begun"), (0, "lasting"), (0, "lasting")]
    assert [len(event.places) for event in events] == [1, 2, 3]


def test_consequences_of_nan_are_not_events():
    def change(layer: str, head: int, step: int) -> dict[str, float]:
        if step < 150:
            return {}
        first = (layer, head) == ("blocks.1", 2) and step == 150
        everything = dict.fromkeys(HEALTHY, math.nan)
        return everything | {"broken_row": 7, "broken_call": 2 if first else 9, "broken_origin": 2 if first else 7}

    event = only(play(change))
    assert event.places == (("blocks.1", (2,)),)
    assert "in the key, row 7" in event.message


@pytest.mark.parametrize(
    ("bits", "words"),
    [(1, "query"), (7, "input of the layer"), (8, "scores"), (16, "gradient that arrives"), (32, "gradients of query")],
)
def test_nan_names_the_tensor_in_which_it_began(bits, words):
    event = only(play(since(150, "blocks.1", 2, broken_row=7, broken_call=3, broken_origin=bits)))
    assert words in event.message


def test_a_cause_found_after_its_consequence_takes_the_event():
    """Logits pass the limit first; some reports later a quarter of the heads has collapsed."""

    def change(layer: str, head: int, step: int) -> dict[str, float]:
        logit = 3 * 1.3 ** (min(step, 200) / 10)
        late = {"w_max": 0.99, "relative_entropy": 0.01} if step >= 180 else {}
        return {"max_logit": logit} | late

    events = play(change)
    assert len({event.number for event in events}) == 1
    assert [event.cause for event in events if event.status != "over"][-1] == "collapse"


def test_a_jump_that_stays_becomes_the_new_normal():
    events = play(since(150, "blocks.1", 2, max_logit=90.0), reports=60)
    assert [event.status for event in events] == ["begun", "over"]


def test_a_learning_rate_that_rose_is_named():
    log, sent = EventLog(), []
    for step in range(0, 200, 10):
        change = PROBLEMS["divergence"][0]
        report = [record(x, head, step, **change(x, head, step)) for x in LAYERS for head in range(HEADS)]
        sent += log.update(step, report, rate=1e-3 if step < 150 else 3e-2)
    assert "learning rate is 30×" in sent[0].message


def test_limits_are_read_from_files_and_checked(tmp_path):
    assert Thresholds.read("configs/monitor/default.yaml") == Thresholds()
    assert Thresholds.read("configs/monitor/strict.yaml").exploding == 30.0
    (tmp_path / "limits.yaml").write_text("explosion: 3\n")
    with pytest.raises(ArgumentError, match="explosion"):
        Thresholds.read(tmp_path / "limits.yaml")
    for value in (-1.0, math.nan):
        with pytest.raises(ArgumentError, match="exploding"):
            Thresholds(exploding=value)
    with pytest.raises(ArgumentError, match="seen"):
        Thresholds(seen=4)
    with pytest.raises(ArgumentTypeError, match="jump"):
        Thresholds(jump="high")  # type: ignore[arg-type]


def attend(attention, sharpness=1.0, spoiled=None):
    """One call whose queries are scaled, with a NaN in a row of one head."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 32, 8, generator=generator) for _ in range(3))
    q = q * sharpness
    if spoiled is not None:
        q[0, spoiled[0], spoiled[1]] = math.nan
    return attention(q, k, v, is_causal=True)


def test_events_reach_sinks_log_and_callback(caplog):
    attention, sink, heard = ScaledDotProductAttention(), MemorySink(), []
    with (
        caplog.at_level(logging.WARNING),
        Monitor(attention, every=1, sinks=[sink], on_alert=heard.append) as monitor,
    ):
        for step in range(8):
            attend(attention, spoiled=(1, 5) if step == 6 else None)
            monitor.step(step)
        assert monitor.events == heard[:1]
    (event,) = heard
    assert (event.cause, event.start, event.places) == ("nan", 6, (("ScaledDotProductAttention", (1,)),))
    assert "query, row 5" in event.message
    assert list(sink.events) == heard
    assert event.message in caplog.text


def test_no_limits_no_events():
    attention, heard = ScaledDotProductAttention(), []
    with Monitor(attention, every=1, alerts=None, on_alert=heard.append) as monitor:
        attend(attention, spoiled=(1, 5))
        monitor.step(0)
        assert monitor.events == heard == []


def test_what_a_callback_raises_is_the_users_own():
    attention = ScaledDotProductAttention()

    def stop(event):
        raise KeyboardInterrupt(event.cause)

    with Monitor(attention, every=1, on_alert=stop) as monitor:
        attend(attention, spoiled=(0, 3))
        with pytest.raises(KeyboardInterrupt):
            monitor.step(0)


def test_nan_only_in_the_gradient_names_the_layer_in_which_it_began():
    model, heard = tiny_gpt.build(layers=4), []
    with Monitor(model, every=1, on_alert=heard.append) as monitor:
        for step in range(4):
            model.zero_grad()
            if step == 2:
                spoil = model.blocks[1].register_forward_hook(lambda module, args, out: spoil_gradient(out))
            model.loss(tiny_gpt.batch()).backward()
            if step == 2:
                spoil.remove()
            monitor.step(step)
    event = only(heard)
    assert (event.cause, event.start) == ("nan", 2)
    ((layer, _),) = event.places
    assert layer.startswith("blocks.1")
    assert "gradient that arrives" in event.message


def spoil_gradient(out):
    out.register_hook(lambda gradient: gradient * math.nan)
    return out


@pytest.mark.parametrize("scaled", [True, False], ids=["skipped by a GradScaler", "taken"])
def test_nan_in_gradients_is_critical_only_if_the_optimizer_takes_the_update(scaled):
    model, heard = tiny_gpt.build(layers=2), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, enabled=scaled)
    with Monitor(model, every=1, on_alert=heard.append) as monitor:
        for step in range(2):
            optimizer.zero_grad()
            loss = model.loss(tiny_gpt.batch())
            (scaler.scale(loss * 1e3) if scaled else loss * math.nan).backward()
            scaler.step(optimizer)
            scaler.update()
            monitor.step(step)
    assert heard[0].cause == "nan"
    assert heard[0].severity == ("warning" if scaled else "critical")
    assert ("GradScaler" in heard[0].advice) == scaled


def test_a_skipped_update_that_is_taken_later_becomes_critical():
    model, heard = tiny_gpt.build(layers=2), []
    with Monitor(model, every=1, on_alert=heard.append) as monitor:
        for step in range(2):
            (model.loss(tiny_gpt.batch()) * math.nan).backward()
            if step == 1:
                torch.optim.SGD(model.parameters(), lr=0.1).step()
            monitor.step(step)
    assert [(event.number, event.status, event.severity) for event in heard] == [
        (0, "begun", "warning"),
        (0, "lasting", "critical"),
    ]


def test_nan_in_the_loss_is_seen_in_the_last_layer():
    model, heard = tiny_gpt.build(layers=3), []
    with Monitor(model, every=1, on_alert=heard.append) as monitor:
        (model.loss(tiny_gpt.batch()) * math.nan).backward()
        monitor.step(0)
    event = only(heard)
    assert [layer.split(".")[1] for layer, _ in event.places] == ["2"]


def test_rows_of_a_new_event_are_written(tmp_path):
    safetensors = pytest.importorskip("safetensors", reason="safetensors comes with transformers, which is optional")
    attention, heard = ScaledDotProductAttention(), []
    with Monitor(attention, every=1, rows=5, on_alert=heard.append, dump=tmp_path) as monitor:
        attend(attention, spoiled=(1, 5))
        monitor.step(0)
    (path,) = tmp_path.glob("*")
    assert path.name == "step0-ScaledDotProductAttention-head1-nan.safetensors"
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata()["message"] == heard[0].message
        assert file.get_tensor("query").shape == file.get_tensor("key").shape == (1, 5, 8)


CRITICAL = Event(3, "collapse", "begun", "critical", 5, 7, (), "entropy fell", "lower the rate")
WARNING = Event(4, "diffuse", "begun", "warning", 5, 7, (), "entropy rose", "wait")


def test_a_run_can_be_stopped():
    with pytest.raises(RunStopped, match="entropy fell") as caught:
        actions.stop()(CRITICAL)
    assert caught.value.event is CRITICAL
    actions.stop()(WARNING)
    with pytest.raises(RunStopped):
        actions.stop(critical_only=False)(WARNING)


def test_a_checkpoint_is_saved_once_per_event(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    save = actions.save_checkpoint(tmp_path / "saved", model, optimizer)
    for event in (WARNING, CRITICAL, Event(3, "collapse", "lasting", "critical", 5, 8, (), "", "")):
        save(event)
    (path,) = (tmp_path / "saved").iterdir()
    content = torch.load(path)
    torch.testing.assert_close(content["model"]["weight"], model.weight.detach())
    assert content["optimizer"]["param_groups"]
    assert Event.from_dict(content["event"]) == CRITICAL


def test_a_learning_rate_is_lowered_once_per_event_and_stays_low_under_a_scheduler():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    lower = actions.lower_learning_rate(optimizer, 0.1)
    for event in (WARNING, CRITICAL, Event(3, "collapse", "over", "critical", 5, 8, (), "", "")):
        lower(event)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    with pytest.raises(ArgumentError, match="factor"):
        actions.lower_learning_rate(optimizer, 2.0)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("damage", ["weight", "gradient"])
def test_nan_between_two_reports_is_named_with_its_own_step_and_layer(damage, compiled):
    """The optimizer spreads it over all weights before the next report."""
    model, heard = tiny_gpt.build(layers=4), []
    optimizer = torch.optim.AdamW(model.parameters())
    loss = torch.compile(model.loss, backend="eager") if compiled else model.loss
    with Monitor(model, every=10, on_alert=heard.append) as monitor:
        for step in range(21):
            optimizer.zero_grad()
            if step == 13 and damage == "weight":
                with torch.no_grad():
                    next(model.blocks[2].parameters()).mul_(math.nan)
            if step == 13 and damage == "gradient":
                spoil = model.blocks[2].register_forward_hook(lambda module, args, out: spoil_gradient(out))
            (model.loss if step == 13 else loss)(tiny_gpt.batch()).backward()
            if step == 13 and damage == "gradient":
                spoil.remove()
            optimizer.step()
            monitor.step(step)
    event = only(heard)
    assert (event.cause, event.start, event.step) == ("nan", 13, 20)
    assert [layer.split(".")[1] for layer, _ in event.places] == ["2"]
    assert ("gradient that arrives" in event.message) == (damage == "gradient")


def test_heads_that_learn_to_attend_within_a_few_reports_are_no_event():
    """Induction heads form at once: logits grow threefold from report to report, values grow, entropy falls."""
    logits, shares = [0.1, 0.1, 0.2, 0.8, 2.2, 6.9, 10.9, 11.6, 10.3], [1, 1, 1, 1, 0.96, 0.8, 0.54, 0.47, 0.49]
    values = [0.16, 0.17, 0.21, 0.31, 0.44, 0.49, 0.56, 0.68, 0.76]

    def change(layer: str, head: int, step: int) -> dict[str, float]:
        at = min(step // 10, 8)
        return {"max_logit": logits[at], "relative_entropy": shares[at], "value_size": values[at]}

    assert play(change) == []


def test_a_layer_without_a_gradient_between_layers_that_have_one_is_cut_off():
    gone = {"output_gradient": math.nan, "score_gain": math.nan}
    event = only(play(lambda x, h, s: gone if x == "blocks.1" and s >= 150 else {}))
    assert (event.cause, event.places) == ("dead_output", (("blocks.1", (0, 1, 2, 3)),))
    assert play(lambda x, h, s: gone if x != "blocks.2" and s >= 150 else {}) == []  # frozen layers


def test_tokens_that_are_all_equal_are_a_rank_collapse_from_the_first_layer_on():
    equal = {"token_angle": 1e-8, "relative_entropy": 0.999999, "max_logit": 0.001, "score_gain": 1e-8}
    events = play(lambda x, h, s: equal if s >= 150 else {})
    assert len({event.number for event in events}) == 1
    assert (events[-1].cause, len(events[-1].places), events[-1].start) == ("rank_collapse", 3, 150)


def test_a_history_is_frozen_at_the_first_sighting():
    event = only(play(since(150, "blocks.1", 2, value_size=0.0), reports=180, every=1))
    assert "usually 0.5" in event.message


def test_an_event_as_old_as_the_run_has_no_usual_value():
    event = only(play(since(0, "blocks.1", 2, value_size=0.0)))
    assert "nan" not in event.message


def test_a_divergence_that_lasts_is_not_over():
    events = play(PROBLEMS["divergence"][0], reports=80)
    assert [event.status for event in events] == ["begun"]


def test_what_is_no_function_is_refused_as_a_callback():
    with pytest.raises(ArgumentTypeError, match="on_alert"):
        Monitor(ScaledDotProductAttention(), on_alert=[print])
