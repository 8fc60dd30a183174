"""The page as people see it, in headless Chromium."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.planner.plan_requests import plan_request, table
from tests.viz.browser import Browser, Page, browser_path
from tests.viz.reports import entry, large, plan_of, report, small
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.cost.default_speeds import default_speeds
from tilerec.planner.cost.workload import Skew
from tilerec.planner.make_plan import make_plan
from tilerec.planner.report.explanation import explain
from tilerec.planner.report.plan_report import PlanReport
from tilerec.planner.report.report_text import percent_text
from tilerec.spec.plan import ParameterSharding, Wire
from tilerec.spec.topology import Topology
from tilerec.viz.report import write_report

pytestmark = pytest.mark.skipif(
    browser_path() is None,
    reason="no Chromium or Chrome on PATH (Debian: apt-get install chromium), and CHROME names none",
)
Open = Callable[..., Page]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser") / "profile") as found:
        yield found


@pytest.fixture(scope="module")
def many() -> PlanReport:
    return large(10_000, 1_024, 8)


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """Open a report as a page; at the end, nothing went wrong in it and nothing but the file was read."""
    opened: list[Page] = []

    def found(made: PlanReport, **about: object) -> Page:
        path = tmp_path / "report.html"
        write_report(plan_of(made) if len(made.tables) < 100 else None, made, path)
        page = browser.open(path, **about)  # type: ignore[arg-type]
        page.settle()
        opened.append(page)
        return page

    yield found
    for page in opened:
        assert page.troubles() == []
        assert all(url.endswith("/report.html") for url in page.fetched())
        page.close()


def test_every_rank_has_a_bar_of_time_and_one_of_memory(show: Open) -> None:
    page = show(small())
    assert page.count("#ranks .line") == 8
    assert page.count("#ranks .bar.time") == page.count("#ranks .bar.memory") == 8
    assert page.count("#stages tbody tr") == 6
    # Four stages take time; the fifth is for more hosts' rows.
    assert page.count('#ranks .line[data-item="5"] .bar.time i') == 4


def test_bars_are_as_long_as_their_times(show: Open) -> None:
    made = small()
    page = show(made)
    width = page.ask("document.querySelector('#ranks .bar.time').clientWidth")
    drawn = page.ask(
        "[...document.querySelectorAll('#ranks .bar.time')]"
        ".map((b) => [...b.children].reduce((w, i) => w + i.offsetWidth, 0))"
    )
    load = made.load_ps.sum(1)
    for pixels, ps in zip(drawn, load.tolist(), strict=True):
        assert abs(pixels - width * ps / load.max()) <= 4


def test_the_most_loaded_rank_is_shown_with_what_makes_it_so(show: Open) -> None:
    made = small()
    page = show(made)
    assert page.text("#rank-name") == f"Rank {made.slowest_rank}"
    assert page.text("#rank-about") == "host 1; the most loaded rank"
    assert page.text("#balance").startswith("rank 5")
    heavy = made.weighs_most(made.slowest_rank)
    assert page.texts("#heaviest button") == [f"{one.path}.{one.name}" for one, _ in heavy]
    assert page.texts("#heaviest .n")[0] == f"{heavy[0][1] * 1e3:.2f} ms"
    assert "ebc.shop alone is 92 %" in page.text("#rank-load")


@pytest.mark.parametrize("rank", range(8))
def test_what_a_rank_has_to_do_is_counted_as_the_report_counts_it(show: Open, rank: int) -> None:
    made = small()
    page = show(made)
    page.click(f'#ranks .line[data-item="{rank}"]')
    assert page.text("#rank-name") == f"Rank {rank}"
    heavy = made.weighs_most(rank)
    assert page.texts("#heaviest button") == [f"{one.path}.{one.name}" for one, _ in heavy]


def test_heads_sort_up_and_down(show: Open) -> None:
    page = show(small())

    def names() -> list[str]:
        page.settle()
        return page.texts("#tables .name")

    def head(place: int) -> str:
        return f"#tables .head > :nth-child({place}) button"

    assert names()[0] == "shop"  # by what they add
    page.click(head(2))
    assert names() == ["query", "brand", "city", "item", "odd", "shop", "user"]  # by module, then name
    page.click(head(2))
    assert names() == ["user", "shop", "odd", "item", "city", "brand", "query"]
    assert page.ask(f"document.querySelector({head(2)!r}).parentNode.getAttribute('aria-sort')") == "descending"
    page.click(head(4))
    assert names()[0] == "user"  # by memory
    page.click("#ranks .head > :nth-child(3) button")
    assert page.texts("#ranks .line > :first-child")[0] == "5"


def test_search_finds_names_cuts_and_ranks(show: Open) -> None:
    made = small()
    page = show(made)
    for words, found in (
        ("BRAND", {"brand"}),
        ("deep.", {"query"}),
        ("cut:row_wise", {"user"}),
        ("row_wise", {"user", "brand"}),
        ("rank:5", {one.name for one in made.tables if 5 in one.ranks}),
        ("rank:5 wise", {"shop", "user", "brand"}),
        ("nowhere", set()),
        ("brand rank:", {"brand"}),  # halfway through typing
        ("brand cut:", {"brand"}),
        ("", {one.name for one in made.tables}),
    ):
        page.type("#search", words)
        assert set(page.texts("#tables .name")) == found
        assert page.text("#found") == (f"{len(found)} of 7 tables" if words else "7 tables")


def test_a_table_is_drawn_as_its_tiles_in_their_ranks_colours(show: Open) -> None:
    page = show(small())
    page.ask("[...document.querySelectorAll('#tables .name')].find((n) => n.textContent === 'item').click()")
    assert page.text("#table-name") == "ebc.item"
    assert page.count("#tile-list tbody tr") == 4
    # Four blocks of columns on ranks 0 to 3, which have the first four colours.
    colours = page.ask(
        """(() => {
          const node = document.getElementById("tiles"), pen = node.getContext("2d"), found = [];
          for (let i = 0; i < 4; i++) {
            const [r, g, b] = pen.getImageData(Math.round(node.width * (i + 0.1) / 4), 5, 1, 1).data;
            found.push("#" + [r, g, b].map((x) => x.toString(16).padStart(2, "0")).join(""));
          }
          const css = getComputedStyle(document.documentElement);
          return [found, [0, 1, 2, 3].map((i) => css.getPropertyValue("--c" + i).trim())];
        })()"""
    )
    assert colours[0] == colours[1]


def test_names_are_shown_as_text_whatever_is_in_them(show: Open) -> None:
    topology = Topology(2)
    name = "</script><img src=x onerror=document.title='broken'>"
    page = show(report([entry(name, 10, 8, "table_wise", [1], topology, path="<b>")], topology, notes=("<i>",)))
    assert page.text("#table-name") == f"<b>.{name}"
    assert page.text("#notes") == "<i>"
    assert page.count("img, b > b, #notes i") == 0
    assert page.ask("document.title") == "Plan report: 1 table, 2 ranks"


def test_a_name_that_turns_the_writing_direction_turns_nothing_beside_it(show: Open) -> None:
    topology = Topology(2)
    page = show(report([entry("\u202eflipped", 10, 8, "table_wise", [1], topology, path="")], topology))
    assert page.text("#rank-load bdi") == "\u202eflipped"
    assert page.text("#rank-load").endswith("\u202eflipped alone is 97 %.")


def test_a_table_without_a_name_can_be_picked(show: Open) -> None:
    topology = Topology(2)
    tables = [entry(name, 10, 8, "table_wise", [1], topology, path="") for name in ("", " ", "t")]
    page = show(report(tables, topology))
    assert page.texts("#heaviest button") == ["(no name)", "(no name)", "t"]
    assert sorted(page.texts("#tables .name")) == ["(no name)", "(no name)", "t"]
    page.click("#heaviest button")
    assert page.text("#table-name") == "(no name)"


def test_one_time_is_written_alike_all_over_the_page(show: Open) -> None:
    made = small()
    for cost, text in (
        (31 * 10**9, "31.0 ms"),
        (448_200_000, "448 µs"),
        (4_900_000, "4.90 µs"),
        (12, "12 ps"),
    ):
        page = show(replace(made, cost_ps=cost, bound_ps=cost))
        assert (page.text("#cost"), page.text("#bound")) == (text, text)
        assert page.text("#step-axis") == f"no plan is below {text}"


def test_colours_follow_the_readers_choice_and_change_with_it(show: Open) -> None:
    page = show(small(), dark=True)
    shade = "(() => { const m = /\\d+/.exec(getComputedStyle(document.body).backgroundColor); return Number(m[0]); })()"
    segment = "getComputedStyle(document.querySelector('#ranks .bar i')).backgroundColor"
    assert page.ask(shade) < 60
    before = page.ask(segment)
    page.colours("light")
    page.settle()
    assert page.ask(shade) > 200
    assert page.ask(segment) != before


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_the_page_never_scrolls_sideways(show: Open, many: PlanReport, width: int) -> None:
    names = report(
        [entry("x" * 200, 10, 8, "row_wise", None, Topology(4), path="y" * 200)],
        Topology(4),
        notes=("z" * 300,),
    )
    for made in (small(), names, many):
        page = show(made, width=width, height=844)
        assert page.ask("document.documentElement.scrollWidth") <= width


def test_ten_thousand_tables_on_a_thousand_ranks(show: Open, many: PlanReport) -> None:
    page = show(many)
    # Only rows in sight exist.
    assert page.count("#tables .line") < 40
    assert page.count("#ranks .line") < 40
    assert page.count("*") < 1_500
    assert page.text("#found") == "10,000 tables"
    rank = many.slowest_rank
    assert page.text("#rank-name") == f"Rank {rank}"
    heavy = many.weighs_most(rank, 3)
    assert page.texts("#heaviest button")[:3] == [f"{one.path}.{one.name}" for one, _ in heavy]
    assert page.ask("!document.getElementById('overview').hidden")
    # To the very end, by keyboard and by scrolling.
    page.click("#tables .head > :nth-child(2) button")
    page.ask("document.querySelector('#tables .view').scrollTop = 1e9")
    page.settle()
    last = sorted(f"{one.path}.{one.name}" for one in many.tables)[-1]
    assert page.texts("#tables .name")[-1] == last.partition(".")[2]
    page.ask(
        "document.querySelector('#tables .line')"
        ".dispatchEvent(new KeyboardEvent('keydown', {key: 'Home', bubbles: true}))"
    )
    page.settle()
    assert page.ask("document.activeElement.getAttribute('aria-rowindex')") == "1"


def test_a_report_without_tables_costs_or_bound(show: Open) -> None:
    topology = Topology(3, "cpu")
    page = show(replace(report([], topology), bound_ps=0, cost_ps=0))
    assert page.text("#found") == "0 tables"
    assert page.count("#ranks .line") == 3
    assert page.text("#rank-about") == "host 0; the most loaded rank, but the ranks are balanced"
    assert page.text("#tables .empty") == "There are no tables."
    assert page.count("#rank button") == 0
    assert page.ask("document.getElementById('table').offsetHeight") == 0
    one = replace(entry("t", 5, 3, "row_wise", None, topology), owner_ps=(), home_ps=())
    page = show(replace(report([], topology), tables=(one,)))
    assert "not known" in page.text("#table")


def test_a_rank_over_its_cap_is_marked(show: Open) -> None:
    topology = Topology(2, hbm_cap=1000)
    page = show(report([entry("t", 1000, 8, "table_wise", [1], topology)], topology))
    assert page.count("#ranks .bar.memory i") == 1
    shown, over = page.ask(
        """(() => {
          const probe = document.body.appendChild(document.createElement("i"));
          probe.style.background = "var(--over)";
          const both = [document.querySelector("#ranks .bar.memory i"), probe];
          return both.map((n) => getComputedStyle(n).backgroundColor);
        })()"""
    )
    assert shown == over


@pytest.fixture(scope="module")
def planned() -> PlanReport:
    """The report of a plan that a planner made: two tables without constraints, one with, one by hand."""
    limits = {
        "b": ParameterConstraints(["row_wise"], pooling_factors=[10.0]),
        "pin": ParameterConstraints(sharding=ParameterSharding("table_wise", ranks=[1])),
    }
    tables = [table("a", 400_000), table("b", 3_000), table("narrow", 9_000, 16), table("pin", 70)]
    return make_plan(plan_request(tables, Topology(2, local_world_size=1), limits, batch_size=2048)).report


def pick(page: Page, name: str) -> None:
    page.ask(f"[...document.querySelectorAll('#tables .name')].find((n) => n.textContent === {name!r}).click()")


def test_the_top_says_where_the_bottleneck_is_and_what_would_help(show: Open, planned: PlanReport) -> None:
    made, page = planned, show(planned)
    assert page.text("#banner").startswith("SPEEDS ARE DEFAULTS, NOT MEASURED: times assume 'default for cuda")
    assert "tilerec calibrate --nproc 1" in page.text("#banner")
    top = made.bottleneck.largest
    assert page.text("#bottleneck").lower().startswith(f"{top.name}, {percent_text(top.share)} of the step")
    assert page.texts("#helps tbody td:first-child") == [one.change for one in made.what_would_help()]
    assert page.texts("#helps tbody td:nth-child(2)") == [one.outcome for one in made.what_would_help()]
    order = "[...document.querySelectorAll('h2')].map((n) => n.textContent)"
    assert page.ask(order)[:3] == ["Where is the bottleneck?", "What would help?", "Why is this table there?"]


def test_every_table_says_why_it_is_cut_so_with_all_ways_folded(show: Open, planned: PlanReport) -> None:
    made, page = planned, show(planned)
    assert made.request is not None
    for name in ("a", "b", "narrow"):
        pick(page, name)
        found = explain(made.request, name)
        assert page.text("#why-so").lower() == found.reason().lower().replace(" us ", " µs ")
        assert not page.ask("document.getElementById('why').open")
        assert page.count("#why tbody tr") == len(found.considered)
        assert page.texts("#why tbody td:first-child") == [way.option for way in found.considered]
        assert page.texts("#why tbody td:nth-child(3)")[0] == "chosen"
    assert "column tiles of 8 are narrower than min_partition, 32 columns by default" in page.text("#why")
    pick(page, "pin")
    assert "given by hand" in page.text("#why-not")
    assert page.count("#why") == 0


def test_the_card_of_a_table_numbered_by_frequency_draws_its_reads_and_the_cuts(show: Open) -> None:
    """The curve rises to the right; the vertical lines of cuts have no colour."""
    limits = {
        "a": ParameterConstraints(pooling_factors=[20], skew=Skew(100_000, 1.05, ordered=True)),
        "b": ParameterConstraints(["table_wise"]),
    }
    request = plan_request([table("a", 100_000, pooled=False), table("b", 1000)], Topology(4), limits)
    page = show(make_plan(request).report)
    pick(page, "b")
    assert page.count("#curve") == 0
    pick(page, "a")
    assert page.count("#curve") == 1
    assert "numbered by frequency" in page.text("#table")
    # Pixels in one column of the picture: the first row from above that has the colour of the curve.
    heights = page.ask(
        "(() => { const c = document.getElementById('curve'), pen = c.getContext('2d');"
        "const down = (x) => { const d = pen.getImageData(Math.floor(x * c.width), 0, 1, c.height).data;"
        "for (let y = 0; y < c.height; y++) if (d[4 * y + 2] > d[4 * y] + 60) return y / c.height; return 1; };"
        "return [0.05, 0.3, 0.6, 0.95].map(down); })()"
    )
    assert heights == sorted(heights, reverse=True)
    assert heights[-1] < 0.15 < 0.6 < heights[0]


def test_the_curve_of_named_ids_has_hot_rows_and_no_cuts_of_rows(show: Open) -> None:
    hot = tuple(range(7, 20_000, 20))  # anywhere in the table: the cuts of its rows say nothing about these ids
    limits = {"a": ParameterConstraints(["row_wise"], pooling_factors=[20], skew=Skew(20_000, 1.3, hot=hot))}
    given = table("a", 20_000, pooled=False, wire=Wire(distinct=False))
    made = make_plan(plan_request([given], Topology(4, "cpu", intra_host_bw=1e4), limits))
    sharding = made.plan["ebc"]["a"]
    assert sharding.hot
    page = show(made.report)
    pick(page, "a")
    title = f"Reads: share of its ids that its most frequent ones have, {len(sharding.hot):,} hot rows shaded"
    assert page.text("#curve-title") == title
    # In the first line of pixels the shade of the hot rows is all that is drawn.
    shaded = (
        "(() => { const c = document.getElementById('curve'), pen = c.getContext('2d');"
        "const d = pen.getImageData(0, 0, c.width, 1).data; let last = 0;"
        "for (let x = 0; x < c.width; x++) if (d[4 * x + 3]) last = (x + 1) / c.width; return last; })()"
    )
    place = math.log1p(len(sharding.hot)) / math.log1p(20_000)
    assert page.ask(shaded) == pytest.approx(place, abs=0.02)


def test_measured_speeds_have_no_banner_and_are_named(show: Open) -> None:
    topology = Topology(2)
    speeds = replace(default_speeds(topology), origin="measured, 2 cuda ranks")
    page = show(report([entry("t", 10, 8, "table_wise", [1], topology)], replace(topology, speeds=speeds)))
    assert page.ask("document.getElementById('banner').offsetHeight") == 0
    assert page.text("#measured") == "Speeds: measured, 2 cuda ranks."
    assert "need the request" in page.text("section[aria-labelledby=h-helps] p")
    assert "without the plan's request" in page.text("#why-not")


def test_balanced_ranks_are_called_so(show: Open) -> None:
    made = small()
    page = show(replace(made, load_ps=np.full_like(made.load_ps, 10**9)))
    assert page.text("#balance").startswith("balanced")
    assert page.texts("#stages tbody td:nth-child(4)") == ["balanced"] * 5 + ["all ranks"]
    assert "the ranks are balanced" in page.text("#rank-about")
    assert page.count("#rank .sub") == 0


def test_what_is_left_over_is_named(show: Open) -> None:
    topology = Topology(4, local_world_size=2)
    tables = [entry(f"t{i:02d}", 100, 8, "table_wise", [0], topology, scale=10**6 + i) for i in range(13)]
    made = report(tables, topology)
    load = made.load_ps + np.array([0, 0, 0, 0, 7 * 10**9]) + np.array([9 * 10**9, 0, 0, 0, 0])
    page = show(replace(made, load_ps=load))
    texts = page.texts("#rank .others")
    assert texts[0].startswith("and 3 other tables of rank 0, ")
    assert texts[1].startswith("and 8 other tables of rank 0, ")
    says = page.text("#rank-load")
    assert "7.00 ms of its network card for tables of the other 1 ranks of its host" in says
    assert "9.00 ms for no single table: bookkeeping, and collectives" in says
    page.click("#rank .others button")
    assert page.text("#found") == "13 tables"
    assert "the rest" not in page.text("main")
    assert "null" not in page.text("main")


def test_colours_are_okabe_and_itos_and_stages_between_hosts_are_hatched_too(show: Open) -> None:
    page = show(small())
    shown = page.ask(
        "[0,1,2,3,4,5,6].map((i) => getComputedStyle(document.documentElement).getPropertyValue(`--c${i}`))"
    )
    assert shown == ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442"]
    assert page.texts("#legend .hatch ~ *, #legend li:has(.hatch)") == ["rows between hosts"]
    made = small()
    load = made.load_ps.copy()
    load[:, 4] = 10**9
    page = show(replace(made, load_ps=load))
    assert page.count("#step-bar .hatch") == 1
    assert "rows between hosts" in page.texts("#step-bar .tag")
    assert page.count("#ranks .bar.time .hatch") == 8


def test_names_of_heavy_tables_are_told_apart_on_a_phone(show: Open) -> None:
    topology = Topology(2)
    tables = [entry(f"table_{i:05d}", 100, 8, "table_wise", [0], topology, path="sparse.ebc_0") for i in range(3)]
    page = show(report(tables, topology), width=390, height=844)
    cut = "[...document.querySelectorAll('#heaviest button')].map((n) => n.scrollWidth > n.clientWidth)"
    assert page.ask(cut) == [False] * 3


@pytest.mark.parametrize("width", [390, 1280])
def test_heads_of_tables_do_not_wrap(show: Open, planned: PlanReport, width: int) -> None:
    page = show(planned, width=width, height=844)
    page.ask("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    page.settle()
    wrapped = page.ask(
        """(() => {
          const heads = [...document.querySelectorAll("th, .head button")].filter((n) => n.offsetHeight);
          const lines = (n) => { const r = document.createRange(); r.selectNodeContents(n);
            return new Set([...r.getClientRects()].map((one) => Math.round(one.top))).size; };
          return [heads.length, heads.filter((n) => lines(n) > 1).map((n) => n.textContent)];
        })()"""
    )
    assert wrapped[0] > 15
    assert wrapped[1] == []
    tops = page.ask("[...new Set([...document.querySelectorAll('#tables .head button')].map((n) => n.offsetTop))]")
    assert len(tops) == 1
    assert page.ask("document.documentElement.scrollWidth") <= width
