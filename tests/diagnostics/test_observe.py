"""One look at a model: `with attnscale.observe(model) as record`."""

from __future__ import annotations

import html.parser
import sys

import pytest
import tiny_gpt
import torch

import attnscale
from attnscale import Monitor
from attnscale.errors import ArgumentError, ArgumentTypeError, MissingDependencyError


@pytest.fixture
def seen():
    model = tiny_gpt.build(layers=3)
    with attnscale.observe(model) as record:
        model.loss(tiny_gpt.batch()).backward()
    return record


def test_a_block_gives_one_record_for_each_layer_and_head(seen):
    assert [(record.layer, record.head) for record in seen.records] == [
        (f"blocks.{layer}.attention", head) for layer in range(3) for head in range(2)
    ]
    assert seen.records[0].forward["visible"].rows == 2 * 23  # every row of the batch
    assert all(record.backward and "gain" in record.scalars for record in seen.records)


def test_the_numbers_are_those_of_a_monitor(seen):
    model = tiny_gpt.build(layers=3)
    with Monitor(model, every=1, rows=None, alerts=None) as monitor:
        model.loss(tiny_gpt.batch()).backward()
        assert list(seen.records) == monitor.step(0)


def test_without_a_backward_there_is_none_in_the_table():
    model = tiny_gpt.build()
    with attnscale.observe(model, rows=5) as record, torch.no_grad():
        model(tiny_gpt.batch())
    assert [seen.backward for seen in record.records] == [{}] * 4
    assert record.records[0].forward["visible"].rows == 2 * 5
    assert "gain" not in str(record)
    assert len(record.plot().axes) == 2 * 6  # a map and its scale for each quantity of the forward


def test_the_model_is_left_as_it_was_also_by_an_exception():
    model = tiny_gpt.build()
    before = [dict(vars(block.attention)) for block in model.blocks]
    with pytest.raises(IndexError), attnscale.observe(model) as record:
        model(tiny_gpt.batch() + 1000)  # no such tokens
    assert record.records == ()
    assert [dict(vars(block.attention)) for block in model.blocks] == before
    with attnscale.observe(model):
        pass  # nothing is attached any more that would stand in the way


def test_a_block_without_a_call_says_so():
    with attnscale.observe(tiny_gpt.build()) as record:
        assert str(record).startswith("no records")
    assert str(record).startswith("no records")
    assert record._repr_html_().startswith("<p>no records")
    assert len(record.to_pandas()) == 0
    with pytest.raises(ArgumentError, match="records="):
        record.plot()


def test_it_prints_as_an_aligned_table(seen):
    lines = str(seen).splitlines()
    assert lines[0].split()[:3] == ["layer", "head", "w_max"]
    assert len(lines) == 1 + 6
    assert len({len(line) for line in lines}) == 1
    layer, head, w_max = lines[4].split()[:3]
    assert (layer, head) == ("blocks.1.attention", "1")
    assert float(w_max) == pytest.approx(seen.records[3].forward["w_max"].mean, rel=1e-3)
    assert repr(seen) == "<Observation of 6 heads>"


class Cells(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attributes: object) -> None:
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        self.rows[-1][-1] += data

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_notebook_shows_the_same_table_in_colours(seen):
    parser = Cells()
    parser.feed(seen._repr_html_())
    assert parser.open == []
    assert [row[0] for row in parser.rows] == ["layer", *(record.layer for record in seen.records)]
    plain = [line.split() for line in str(seen).splitlines()[1:]]
    assert list(parser.rows[1:]) == plain
    assert seen._repr_html_().count("background:#") == 6 * (len(parser.rows[0]) - 2)


def test_names_of_layers_are_escaped_in_html(seen):
    seen.records = [attnscale.diagnostics.Record(0, "<b>", 0, seen.records[0].forward)]
    assert "<td>&lt;b&gt;</td>" in seen._repr_html_()


def test_pandas_gets_every_number(seen):
    frame = seen.to_pandas()
    assert list(frame.index) == [(record.layer, record.head) for record in seen.records]
    for record in seen.records:
        row = frame.loc[(record.layer, record.head)]
        assert row["forward/w_max/mean"] == record.forward["w_max"].mean
        assert row["backward/score_gradient/p90"] == record.backward["score_gradient"].p90
        assert row["gain"] == record.scalars["gain"]
        assert row["rows"] == 46
    assert frame["forward/entropy/mean"].unstack().shape == (3, 2)


def test_the_figure_has_a_map_of_layer_and_head_for_each_main_quantity(seen, tmp_path):
    figure = seen.plot()
    maps = {axis.get_title(): axis for axis in figure.axes if axis.get_title()}
    assert list(maps) == ["w_max", "H / ln n", "max logit", "criticality r", "first keys", "token angle", "score gain"]
    drawn = maps["w_max"].images[0]
    expected = torch.tensor([record.forward["w_max"].mean for record in seen.records]).view(3, 2)
    torch.testing.assert_close(torch.tensor(drawn.get_array().data, dtype=torch.float32), expected)
    assert drawn.get_clim() == (0.0, 1.0)
    figure.savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000


@pytest.mark.parametrize(("method", "package"), [("to_pandas", "pandas"), ("plot", "matplotlib")])
def test_what_is_not_installed_is_named_with_its_extra(seen, method: str, package: str, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependencyError, match=rf"{method} needs {package}: pip install matplotlib pandas"):
        getattr(seen, method)()


def test_bad_arguments_are_refused():
    with pytest.raises(ArgumentError, match="rows=0"), attnscale.observe(tiny_gpt.build(), rows=0):
        pass
    with pytest.raises(ArgumentTypeError, match="model="), attnscale.observe("model"):
        pass
    with pytest.raises(ArgumentError, match="model="), attnscale.observe(torch.nn.Linear(2, 2)):
        pass
