"""What the verbs of a simulated step are all asked: one system on one cluster, in a layout or tuned."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from bench.cli import options

if TYPE_CHECKING:
    from bench.case import Case, CaseSpec, Layout
    from bench.evaluate import CostModel
    from bench.predict import Prediction


@dataclass(frozen=True)
class Asked:
    """The options that those verbs share, see `asks`."""

    system: options.System_
    model: options.Model_
    cluster: options.Cluster_
    seq_len: options.SeqLen
    global_batch_tokens: options.Batch = None
    layout: options.Layout_ = None
    dtype: options.Dtype = "bf16"
    routing: options.Routing_ = "balanced"
    seed: options.Seed = 0
    assumptions: options.AssumptionSet = None
    set_: options.Setting = None

    def spec(self, system: str | None = None) -> "CaseSpec":
        """The case without its layout, of another system where one is named. Raises BadInput."""
        work = (self.seq_len, self.global_batch_tokens, self.dtype, self.routing, self.seed)
        return options.spec_on(system or self.system, self.model, self.cluster, *work)

    def costs(self) -> "CostModel":
        """Raises BadInput."""
        return options.cost_model(self.assumptions, self.set_)

    def given(self) -> "Layout | None":
        """The layout that was asked for. Raises BadInput."""
        return options.layout_of(self.system, self.layout)

    def found(self, costs: "CostModel") -> "tuple[Prediction, dict[str, Any]]":
        """The step in the layout that was asked for, or in the best one, with what the search did.

        Raises BadInput where it does not fit.
        """
        spec, given = self.spec(), self.given()
        return best(spec, costs) if given is None else (fixed(spec.with_layout(given), costs), {})


def fixed(case: "Case", costs: "CostModel") -> "Prediction":
    """A given layout's prediction. Raises BadInput where it does not fit, with what fills the memory."""
    from bench.cli.output import working
    from bench.predict import predict

    with working(f"simulating {case.system}"):
        found = predict(case, costs.values)
    found.require_fits()
    return found


def best(spec: "CaseSpec", costs: "CostModel") -> "tuple[Prediction, dict[str, Any]]":
    """The tuned layout's prediction. Raises BadInput where nothing fits, with the missing GiB and what takes them."""
    from bench.cli.output import working
    from bench.evaluate import nothing_fits, tuned_trial
    from bench.tune import DEFAULT_BUDGET, tune

    with working(f"tuning {spec.system}") as advance:
        found = tune(spec, costs.values, progress=lambda done, left: advance(done, done + left, "layouts"))
    if found.best is None:
        raise nothing_fits(found, costs)
    return found.best, tuned_trial(found, costs, (), DEFAULT_BUDGET).search


def asks(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb as a command whose options are the fields of its first parameter, a dataclass as `Asked`, and its own.

    One that it has itself by the same name is said in its words.
    """
    first, *own = inspect.signature(verb, eval_str=True).parameters.values()
    kind = first.annotation
    shared = list(inspect.signature(kind, eval_str=True).parameters.values())
    by_name = {each.name: each.replace(kind=each.KEYWORD_ONLY) for each in [*shared, *own]}
    names = [field.name for field in fields(kind)]

    @functools.wraps(verb)
    def command(**values: Any) -> None:
        rest = {each.name: values[each.name] for each in own}
        verb(kind(**{name: values[name] for name in names}), **rest)

    command.__signature__ = inspect.Signature(list(by_name.values()))  # type: ignore[attr-defined]
    command.__annotations__ = {}
    return command
