"""`make picture`: the layers of the project and the arrows between them, as the imports are now.

It draws docs/design/picture.svg.

The rows come from the contracts of import-linter (pyproject.toml), the arrows from the graph of imports, so nothing in
the picture is drawn by hand. Arrows point down, or to the side within a row: an import upwards is an error here, as it
is in `make house`.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

import grimp

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs/design/picture.svg"
WIDTH, ROW, BOX, GAP, TOP = 620, 100, 52, 16, 64
"""Pixels: width of a panel; between the tops of two rows; height of a box; between two boxes; above the first row."""
APART = 13.0
"""Least number of pixels between two arrows downwards."""
COLOURS = ("#1b6ca8", "#b3541e", "#3a7d44", "#7b4397", "#a8324a", "#4f6d7a", "#7a6a1b")
"""Colours of arrows: an arrow has the colour of the box that it leaves."""

Arrows = frozenset[tuple[str, str]]
Rows = Sequence[Sequence[str]]


class Panel(NamedTuple):
    """Boxes in rows, the highest layer first; a caption for each; which imports which."""

    title: str
    rows: Rows
    captions: Mapping[str, str]
    arrows: Arrows


class Box(NamedTuple):
    x: float
    y: float
    width: float


def contract(number: int) -> Rows:
    """The layers of a contract; `(name)` is a layer that not every container has, `a : b` and `a | b` share a row."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(found["layers"] for found in contracts if found["name"].startswith(f"{number}."))
    return [[name.strip(" ()") for name in layer.replace(":", "|").split("|")] for layer in layers]


def imports(graph: grimp.ImportGraph) -> Iterator[tuple[str, str]]:
    for module in sorted(graph.modules):
        yield from ((module, imported) for imported in sorted(graph.find_modules_directly_imported_by(module)))


def folders(graph: grimp.ImportGraph, package: str) -> list[str]:
    """Sub-packages of a package, by their last names."""
    return sorted(name.rpartition(".")[2] for name in graph.find_children(package) if graph.find_children(name))


def packages(graph: grimp.ImportGraph) -> Panel:
    rows = contract(1)
    pairs = {(importer.split(".")[0], imported.split(".")[0]) for importer, imported in imports(graph)}
    captions = {name: "  ".join(folders(graph, name)) for row in rows for name in row}
    return Panel("packages: who imports whom", rows, captions, frozenset((a, b) for a, b in pairs if a != b))


def part(module: str) -> tuple[str, str] | None:
    """The plugin that a module belongs to, and its part of the plugin."""
    match module.split("."):
        case ["plugins", plugin, name, *_]:
            return plugin, name
        case _:
            return None


def parts(graph: grimp.ImportGraph) -> Panel:
    """The panel "inside a plugin": an arrow where any plugin has such an import, and which plugins have each part."""
    names = folders(graph, "plugins")
    modules = [found for module in graph.modules if (found := part(module)) and found[0] in names]
    present = {name for _, name in modules}
    rows = [[name for name in row if name in present] for row in contract(2)]
    pairs = [(part(importer), part(imported)) for importer, imported in imports(graph)]
    arrows = frozenset((a[1], b[1]) for a, b in pairs if a and b and a[0] == b[0] and a[0] in names and a[1] != b[1])
    captions = {name: owners([p for p, found in modules if found == name], names) for name in present}
    return Panel("inside a plugin", [row for row in rows if row], captions, arrows)


def owners(having: Sequence[str], names: Sequence[str]) -> str:
    return f"all {len(names)} plugins" if set(having) == set(names) else "  ".join(sorted(set(having)))


def boxes(rows: Rows) -> dict[str, Box]:
    found = {}
    for down, row in enumerate(rows):
        width = (WIDTH - GAP * (len(row) - 1)) / len(row)
        for across, name in enumerate(row):
            found[name] = Box(across * (width + GAP), TOP + down * ROW, width)
    return found


def lanes(arrows: Arrows, at: Mapping[str, Box]) -> Iterator[tuple[str, str, float]]:
    """Each arrow with an x of its own below the box that it leaves. ValueError for one that would point upwards."""
    taken: list[float] = []
    for name, box in at.items():
        targets = sorted((to for of, to in arrows if of == name), key=lambda to: (at[to].y, at[to].x))
        if above := [to for to in targets if at[to].y < box.y]:
            raise ValueError(f"{name} imports {above[0]}, which is above it")
        targets = [to for to in targets if at[to].y > box.y]
        for number, to in enumerate(targets):
            wanted = inside(box.x + box.width * (number + 1) / (len(targets) + 1), at[to])
            taken.append(next(x for x in aside(wanted) if all(abs(x - other) >= APART for other in taken)))
            yield name, to, taken[-1]


def aside(wanted: float) -> Iterator[float]:
    """The x that is wanted, then others ever further to both sides of it."""
    yield wanted
    for step in count(1):
        yield wanted + step * APART
        yield wanted - step * APART


def asides(arrows: Arrows, at: Mapping[str, Box]) -> Iterator[tuple[str, str, str]]:
    """Each arrow within a row, and its path: an arc above the boxes."""
    for of, to in sorted(arrows):
        if at[of].y == at[to].y:
            side = 1 if at[of].x < at[to].x else -1
            start, end = at[of].x + at[of].width / 2 + side * 30, at[to].x + at[to].width / 2 - side * 30
            yield (
                of,
                to,
                f"M{start:.1f} {at[of].y} C{start:.1f} {at[of].y - 30} {end:.1f} {at[of].y - 30} {end:.1f} {at[of].y}",
            )


def inside(x: float, box: Box) -> float:
    """The nearest x at which an arrow straight down meets the box."""
    return min(max(x, box.x + 24), box.x + box.width - 24)


def tips(arrows: Arrows, at: Mapping[str, Box]) -> Iterator[tuple[str, float, float]]:
    for of, to, lane in lanes(arrows, at):
        yield of, lane, at[to].y
    for of, to, path in asides(arrows, at):
        yield of, float(path.split()[-2]), at[to].y


def drawn(panel: Panel, x: float) -> Iterator[str]:
    at = boxes(panel.rows)
    colour = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(at)}
    yield f'<g transform="translate({x:g},0)">'
    yield f'<text x="0" y="26" class="title">{panel.title}</text>'
    for of, to, lane in lanes(panel.arrows, at):  # under the boxes: an arrow to a lower layer passes behind
        yield f'<path d="M{lane:.1f} {at[of].y + BOX} V{at[to].y - 7}" stroke="{colour[of]}" class="arrow"/>'
    for name, box in at.items():
        yield f'<rect x="{box.x:.1f}" y="{box.y}" width="{box.width:.1f}" height="{BOX}" stroke="{colour[name]}"/>'
        yield f'<text x="{box.x + 12:.1f}" y="{box.y + 22}" class="name">{name}</text>'
        yield f'<text x="{box.x + 12:.1f}" y="{box.y + 41}" class="caption">{panel.captions[name]}</text>'
    for of, _, path in asides(panel.arrows, at):
        yield f'<path d="{path}" stroke="{colour[of]}" class="arrow"/>'
    for of, x_of_tip, y in tips(panel.arrows, at):
        yield f'<path d="M{x_of_tip - 5:.1f} {y - 9} h10 l-5 9 Z" fill="{colour[of]}"/>'
    yield "</g>"


STYLE = (
    "text{font-family:sans-serif;fill:#222} .title{font-size:15px;font-weight:bold} .name{font-size:15px} "
    ".caption{font-size:11px;fill:#555} rect{fill:#fbfbf8;stroke-width:1.5;rx:4} .arrow{fill:none;stroke-width:1.6}"
)


def svg(panels: Sequence[Panel]) -> str:
    """The picture, always the same text for the same imports."""
    width = len(panels) * WIDTH + (len(panels) + 1) * 30
    height = TOP + max(len(panel.rows) for panel in panels) * ROW
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-size="14">']
    lines += [f"<style>{STYLE}</style>", f'<path d="M0 0 H{width} V{height} H0 Z" fill="#fff"/>']
    for number, panel in enumerate(panels):
        lines += drawn(panel, 30 + number * (WIDTH + 30))
    return "\n".join([*lines, "</svg>", ""])


def picture() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    names = project["tool"]["importlinter"]["root_packages"]
    graph = grimp.build_graph(*names, exclude_type_checking_imports=True, cache_dir=None)
    return svg([packages(graph), parts(graph)])


if __name__ == "__main__":
    PICTURE.write_text(picture())
