"""Is training through autobatch as fast as the best that an expert writes in the same memory?

Gradients by the parameters, of losses of one example each. By hand they are added up chunk by
chunk in a `jax.lax.scan`, at the best chunk size of a grid that keeps to the memory: as the sum of
the gradients of rows (as `autobatch(jax.grad(loss), ..., SUM)` is written, and optax's
`micro_grad`) or as the gradient of the sum of losses; and through `jax.grad`, of checkpointed
chunks. Memory is that of a call in another process, arguments included: what it grows by over a
call of the compiled program that is not the first, or what XLA plans if that is more.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from _common import (
    in_new_process,
    median_and_spread,
    print_header,
    print_table,
    ratios,
    verdict,
    with_spread,
)
from _timing import Call, geometric_mean, interleaved, timed
from _training import (
    AXES,
    FORMS,
    MODELS,
    Batch,
    Loss,
    gradient_of_mean,
    optax_micro_grad,
    scan_checkpoints,
    scan_gradient_of_sum,
    scan_sum_of_gradients,
    sizes_of,
    sum_of_gradients,
)

from autobatch import SUM, Budget, Plan, autobatch
from autobatch._bound import tree_bytes
from autobatch._memory import planned_bytes, process_growth
from autobatch._strategies import VMAP
from autobatch._units import format_seconds

MIB = 1024**2
SHARES = (4, 10)
"""Budgets are so many parts of what `vmap` needs, but at least what `FEW` rows at once need."""
FEW = 8
BAR_BY_HAND, BAR_OPTAX, BAR_SAME = 1.10, 1.03, 1.05
FINALISTS = 2
"""The best size is the best of so many that were fastest at a glance."""
GLANCES = 2
CONTEST_S, ROUNDS_LEAST = 2.0, 5

EXACT_ROWS = 150
BAR_EXACT = 1e-10
LARGEST_ERROR = 2e-3
"""In float32 forms may differ so much, which add in another order."""
SUMMED = "chunked:64"
REMATERIALISED = ("chunked:64+remat", "map+remat", "vmap+remat")


# autobatch's forms: the plan, tuned where there is no record, and what computes the gradient.


def planned_sum(loss: Loss, batch: Batch, budget: Budget, folder: str) -> tuple[Plan, Any]:
    """The sum of the gradients of rows."""
    summed = autobatch(jax.grad(loss), AXES, SUM, budget=budget, store=folder)
    return summed.plan(*batch), summed


def planned_mean(loss: Loss, batch: Batch, budget: Budget, folder: str) -> tuple[Plan, Any]:
    """The gradient of the mean of the losses."""
    mapped = autobatch(loss, AXES, budget=budget, store=folder)
    return mapped.for_gradient.plan(*batch), jax.jit(gradient_of_mean(mapped))


PLANNED = {each.__name__: each for each in (planned_sum, planned_mean)}


# What a child does.


def need(model: str) -> dict[str, int]:
    """Child: returns the bytes of the summed gradients of rows by `vmap`, of all and of a few."""
    loss, batch = _made(model)
    held = tree_bytes(jax.tree.leaves(batch)) + tree_bytes(jax.tree.leaves(batch[0]))
    peak = _peak(jax.jit(sum_of_gradients(loss)).lower(*batch).compile(), batch)
    return {"vmap": peak, "few": held + (peak - held) * FEW // batch[1].shape[0]}


def survey(model: str, form: str, limit: str) -> list[dict[str, Any]]:
    """Child: returns size, bytes and run time of a form at every size that keeps to a limit."""
    loss, batch = _made(model)
    found = []
    for size in sizes_of(form, batch[1].shape[0]):
        compiled = jax.jit(FORMS[form](loss, size)).lower(*batch).compile()
        if tree_bytes(jax.tree.leaves(batch)) + (planned_bytes(compiled) or 0) > int(limit):
            break
        peak = _peak(compiled, batch)
        seconds = min(timed(partial(compiled, *batch)) for _ in range(GLANCES))
        found.append({"size": size, "peak": peak, "seconds": seconds})
    return found


def planned_peak(model: str, planned: str, memory: str, folder: str) -> dict[str, Any]:
    """Child: returns the strategy that a record leads to, and the bytes of a call."""
    loss, batch = _made(model)
    plan, gradient = PLANNED[planned](loss, batch, Budget(memory=int(memory)), folder)
    return {"strategy": str(plan.strategy), "peak": _peak(gradient.lower(*batch).compile(), batch)}


def exact(model: str) -> dict[str, float]:
    """Child: returns how far gradients of forced strategies are from `vmap`'s, in float64."""
    jax.config.update("jax_enable_x64", True)
    loss, batch = MODELS[model](EXACT_ROWS)
    batch = jax.tree.map(
        lambda leaf: leaf.astype(np.float64) if leaf.dtype == np.float32 else leaf, batch
    )
    summed = autobatch(jax.grad(loss), AXES, SUM, strategy=SUMMED, store=False)
    expected = jax.jit(sum_of_gradients(loss))(*batch)
    errors = {f"SUM, {SUMMED}": relative_error(summed(*batch), expected)}
    expected = jax.jit(gradient_of_mean(jax.vmap(loss, AXES)))(*batch)
    for strategy in REMATERIALISED:
        mapped = autobatch(loss, AXES, strategy=strategy, store=False)
        found = jax.jit(gradient_of_mean(mapped))(*batch)
        errors[f"grad, {strategy}"] = relative_error(found, expected)
    return errors


CHILDREN: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (need, survey, planned_peak, exact)
}


def _made(model: str) -> tuple[Loss, Batch]:
    """Returns a model, its batch on the device."""
    loss, batch = MODELS[model]()
    return loss, jax.block_until_ready(jax.device_put(batch))


def _peak(compiled: Any, batch: Batch) -> int:
    """Returns the bytes of a call of a compiled program, other than its first."""
    jax.block_until_ready(compiled(*batch))  # loads code, and makes what libraries keep for ever
    _, growth = process_growth(lambda: jax.block_until_ready(compiled(*batch)))
    assert growth is not None, "this system does not let the high-water mark be reset"
    return tree_bytes(jax.tree.leaves(batch)) + max(growth, planned_bytes(compiled) or 0)


# What the parent asks them, and times.


@dataclass(frozen=True, kw_only=True)
class Form:
    """A way to write the gradient by hand, at one size: its bytes and run time at a glance."""

    name: str
    size: int
    peak: int
    seconds: float


def relative_error(found: Any, expected: Any) -> float:
    """Returns the largest error of an element over the largest element, of the worst leaf."""

    def error(found: Any, expected: Any) -> float:
        return float(np.max(np.abs(found - expected)) / np.max(np.abs(expected)))

    return max(jax.tree.leaves(jax.tree.map(error, found, expected)))


class Lab:
    """One model: what `vmap` needs of memory, and what its forms by hand need and take."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.loss, self.batch = _made(model)
        needed = in_new_process(__file__, "need", model)
        self.budgets = [max(needed["vmap"] // share, needed["few"]) for share in SHARES]
        self.needed: int = needed["vmap"]
        self._forms = {name: self._surveyed(name) for name in FORMS}

    def _surveyed(self, name: str) -> list[Form]:
        found = in_new_process(__file__, "survey", self.model, name, str(max(self.budgets)))
        return [Form(name=name, **each) for each in found]

    def finalists(self, name: str, budget: int) -> list[Form]:
        """Returns the fastest at a glance of those that keep to a budget."""
        fitting = [each for each in self._forms[name] if each.peak <= budget]
        return sorted(fitting, key=lambda each: each.seconds)[:FINALISTS]

    def call(self, gradient: Any) -> Call:
        """Returns a call of a gradient by hand."""
        return partial(jax.jit(gradient), *self.batch)


@dataclass(frozen=True, kw_only=True)
class Standing:
    """autobatch's form under one budget, and how it compares with each form at its best size.

    Attributes:
        start: the first cells of its row: model, budget, plan, run time, peak and whether it fits.
        over: by form, our run time over that of the best size, in every round.
        sizes: by form, the best size.
    """

    start: list[str]
    over: dict[str, list[float]]
    sizes: dict[str, int]

    def best(self, *names: str) -> list[float]:
        """Returns our run time over that of the fastest of these forms."""
        return max((self.over[name] for name in names if name in self.over), key=np.median)

    def cells(self, name: str) -> list[str]:
        """Returns the ratio to a form and its best size, where any keeps to the budget."""
        if name not in self.over:
            return ["none fits", "-"]
        return [with_spread(self.over[name]), str(self.sizes[name])]


def standings(lab: Lab, planned: str, names: Sequence[str], folder: str) -> list[Standing]:
    """Returns how autobatch's form compares with forms by hand, under each of the budgets.

    Each has a store of its own: from the record of a larger budget a smaller one only chooses.
    """
    stores = [f"{folder}/{budget}" for budget in lab.budgets]
    ours = [
        PLANNED[planned](lab.loss, lab.batch, Budget(memory=budget), store)
        for budget, store in zip(lab.budgets, stores, strict=True)
    ]
    finalists = [
        [form for name in names for form in lab.finalists(name, budget)] for budget in lab.budgets
    ]
    forms = sorted({form for each in finalists for form in each}, key=str)
    calls = [partial(gradient, *lab.batch) for _, gradient in ours]
    calls += [lab.call(FORMS[form.name](lab.loss, form.size)) for form in forms]
    expected = calls[0]()
    assert all(relative_error(call(), expected) < LARGEST_ERROR for call in calls)
    samples = interleaved(calls, seconds=CONTEST_S, least=ROUNDS_LEAST)
    by_hand = dict(zip(forms, samples[len(ours) :], strict=True))
    found = []
    for number, (budget, store, (plan, _)) in enumerate(
        zip(lab.budgets, stores, ours, strict=True)
    ):
        child = in_new_process(__file__, "planned_peak", lab.model, planned, str(budget), store)
        assert child["strategy"] == str(plan.strategy), child
        over = {form: ratios(samples[number], by_hand[form]) for form in finalists[number]}
        found.append(
            _standing(
                over,
                [
                    lab.model,
                    f"{budget / MIB:.1f}",
                    str(plan.strategy),
                    format_seconds(median_and_spread(samples[number])[0]),
                    f"{child['peak'] / MIB:.1f}",
                    verdict(child["peak"] / MIB, budget / MIB),
                ],
            )
        )
    return found


def _standing(over: dict[Form, list[float]], start: list[str]) -> Standing:
    """Returns what is left when every form has its best size, where autobatch wins least."""
    best: dict[str, Form] = {}
    for form, ratio in over.items():
        if form.name not in best or np.median(ratio) > np.median(over[best[form.name]]):
            best[form.name] = form
    return Standing(
        start=start,
        over={name: over[form] for name, form in best.items()},
        sizes={name: form.size for name, form in best.items()},
    )


COLUMNS = ["model", "budget", "plan", "run", "peak", "bar"]


def print_sums(labs: Sequence[Lab], folder: str) -> None:
    """Prints summed gradients of rows beside what is written by hand, and optax."""
    print("autobatch(jax.grad(loss), ..., SUM, budget) over forms by hand at the best size K that")
    print("keeps to the budget, in MiB")
    by_hand = (scan_gradient_of_sum.__name__, scan_sum_of_gradients.__name__)
    optax = optax_micro_grad.__name__
    table, means = [], []
    for lab in labs:
        for standing in standings(lab, planned_sum.__name__, (*by_hand, optax), folder):
            best = standing.best(*by_hand)
            row = [*standing.start, with_spread(best)]
            row.append(verdict(median_and_spread(best)[0], BAR_BY_HAND))
            table.append(
                [*row, *(cell for name in (*by_hand, optax) for cell in standing.cells(name))]
            )
            if optax in standing.over:
                means.append(median_and_spread(standing.over[optax])[0])
    columns = ["by hand", "bar", "grad of sum", "K", "sum of grads", "K", "optax", "K"]
    print_table([*COLUMNS, *columns], table)
    mean = geometric_mean(means)
    print(f"geometric mean of optax: {mean:.2f}   {verdict(mean, BAR_OPTAX)}")


def print_gradients(labs: Sequence[Lab], folder: str) -> None:
    """Prints gradients through mapped losses beside a scan of checkpointed chunks."""
    print(
        "\njax.grad through autobatch(loss, ..., budget) over a scan of checkpointed chunks at the"
    )
    print("best size K that keeps to the budget, in MiB")
    name, table = scan_checkpoints.__name__, []
    for lab in labs:
        for standing in standings(lab, planned_mean.__name__, [name], folder):
            bar = verdict(median_and_spread(standing.over[name])[0], BAR_BY_HAND)
            table.append([*standing.start, *standing.cells(name), bar])
    print_table([*COLUMNS, "by hand", "K", "bar"], table)


def print_unlimited(labs: Sequence[Lab], folder: str) -> None:
    """Prints gradients through mapped losses beside those through `jax.vmap`, memory to spare."""
    print("\njax.grad through autobatch(loss, ...) over jax.grad through jax.vmap, no budget")
    table = []
    for lab in labs:
        plan, gradient = planned_mean(lab.loss, lab.batch, Budget(), f"{folder}/default")
        by_vmap = lab.call(gradient_of_mean(jax.vmap(lab.loss, AXES)))
        ours, theirs = interleaved(
            [partial(gradient, *lab.batch), by_vmap], seconds=CONTEST_S, least=ROUNDS_LEAST
        )
        over = ratios(ours, theirs)
        bar = verdict(median_and_spread(over)[0], BAR_SAME)
        table.append(
            [
                lab.model,
                f"{lab.needed / MIB:.0f}",
                str(plan.strategy),
                format_seconds(median_and_spread(ours)[0]),
                with_spread(over),
                "same plan" if plan.strategy == VMAP else bar,
            ]
        )
    print_table(["model", "vmap's MiB", "plan", "run", "over vmap", "bar"], table)


def print_exact() -> None:
    """Prints how far gradients are from those of `vmap`, in float64."""
    print(f"\nFloat64, {EXACT_ROWS} rows: largest error of a gradient over its largest element")
    errors = {model: in_new_process(__file__, "exact", model) for model in MODELS}
    table = []
    for form in errors[min(errors)]:
        worst = max(each[form] for each in errors.values())
        bar = f"<= {BAR_EXACT:.0e}" + (" missed" if worst > BAR_EXACT else "")
        table.append([form, *(f"{each[form]:.1e}" for each in errors.values()), bar])
    print_table(["form", *errors, "bar"], table)


def main() -> None:
    # A child's C library then gives every larger block back to the kernel once it is free, so that
    # using it again shows as growth.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**16)
    print_header("Training: gradients through autobatch over the best by hand in the same memory")
    labs = [Lab(model) for model in MODELS]
    with tempfile.TemporaryDirectory() as folder:
        print_sums(labs, folder)
        print_gradients(labs, folder)
        print_unlimited(labs, folder)
    print_exact()


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(CHILDREN[sys.argv[1]](*sys.argv[2:])))
    else:
        main()
