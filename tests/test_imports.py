"""Imports go one way, down to the pure modules, and each library has its place.

The import statements are read, not run: those inside functions and under `TYPE_CHECKING` count.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

pytestmark = pytest.mark.source

PACKAGE = Path(__file__).parent.parent / "autobatch"
DESIGN = PACKAGE.parent / "docs" / "design.md"

# From top to bottom. A module imports its own layer and those below it. A subpackage is one unit.
LAYERS = (
    {"__main__", "_cli"},
    {"_api"},
    {"_gradient"},
    {"_dispatch"},
    {"_inside"},
    {"_planner"},
    {"_estimate", "_fixed", "_recall", "_tuner"},
    {"_job", "_lease", "_measure", "_planned", "_start"},
    {"_program", "_store"},
    {"_derivative", "_synthetic"},
    {"_instruments", "_pullback"},
    {"_reversible"},
    {"_eligibility", "_key", "_load", "_mapping", "_memory", "_search"},
    {"_hoisting", "_routes", "_summation"},
    {"_terms"},
    {"_loop_convolution"},
    {"_convolution"},
    {"_rewriting", "_rows"},
    {"_devices", "_workload"},
    {"_leaves", "_nesting", "_reductions"},
    {"_report"},
    {"_settings"},
    {"_nearest", "_shipped"},
    {"_bound", "_choose", "_exchange", "_gate", "_surrogate"},
    {"_database", "_device_lock", "_record"},
    {"_digest", "_errors", "_folder", "_mounts", "_strategies", "_units"},
)

# Effects have their own modules: these have none, and all but `_bound` know nothing of jax.
EFFECTS = ("jax", "jaxlib", "os", "pathlib", "subprocess")
PURE = {
    "_bound": {"jax"},
    "_choose": set(),
    "_digest": set(),
    "_errors": set(),
    "_nearest": set(),
    "_exchange": set(),
    "_gate": set(),
    "_record": set(),
    "_report": set(),
    "_search": set(),
    "_start": set(),
    "_strategies": set(),
    "_surrogate": set(),
    "_units": set(),
}

# Library: the units that may import it.
PLACES = {
    "click": {"_cli"},
    "diskcache": {"_database"},
    "jax._src": set(),
    "rich": {"_cli"},
}

LAYER = {unit: depth for depth, units in enumerate(LAYERS) for unit in units}


def unit_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
UNITS = {unit_of(path) for path in FILES}


def imported(tree: ast.AST) -> Iterator[str]:
    """Yields the full dotted name of everything that is imported, or reached as `jax._src`."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.ImportFrom(level=level) if level:
                raise AssertionError("imports are absolute")
            case ast.Attribute(value=ast.Name(id=module), attr="_src"):
                yield f"{module}._src"


def own_units(path: Path) -> Iterator[str]:
    """Yields the units of autobatch that the module imports, apart from its own."""
    for name in imported(ast.parse(path.read_text())):
        top, _, rest = name.partition(".")
        if top != "autobatch" or rest == "__version__":
            continue
        unit = rest.partition(".")[0]
        unit = unit if unit in UNITS else "_api"  # a public name, or the package itself
        if unit != unit_of(path):
            yield unit


def belongs_to(name: str, library: str) -> bool:
    return f"{name}.".startswith(f"{library}.")


def in_package(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def test_every_module_has_a_layer() -> None:
    assert sorted(UNITS - set(LAYER)) == []


def test_the_design_shows_these_layers() -> None:
    _, section = DESIGN.read_text().split("\n## Layers\n")
    shown = section.split("```")[1].split("->")
    assert [set(re.findall(r"\w+", each)) for each in shown] == list(LAYERS)


@pytest.mark.parametrize("path", FILES, ids=in_package)
def test_no_module_imports_a_higher_one(path: Path) -> None:
    higher = {unit for unit in own_units(path) if LAYER[unit] < LAYER[unit_of(path)]}
    assert higher == set()


def test_no_modules_import_each_other() -> None:
    graph: dict[str, set[str]] = {}
    for path in FILES:
        graph.setdefault(unit_of(path), set()).update(own_units(path))
    TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize("path", [path for path in FILES if unit_of(path) in PURE], ids=in_package)
def test_pure_modules_import_no_effects(path: Path) -> None:
    barred = set(EFFECTS) - PURE[unit_of(path)]
    names = imported(ast.parse(path.read_text()))
    assert [name for name in names if any(belongs_to(name, each) for each in barred)] == []


@pytest.mark.parametrize("path", [*FILES, PACKAGE / "__init__.py"], ids=in_package)
def test_libraries_keep_to_their_places(path: Path) -> None:
    barred = {library for library, units in PLACES.items() if unit_of(path) not in units}
    names = imported(ast.parse(path.read_text()))
    assert [name for name in names if any(belongs_to(name, each) for each in barred)] == []
