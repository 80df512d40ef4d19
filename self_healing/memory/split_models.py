"""`SplitModels`: has the calls of a trainer's models run over fewer rows at a time."""

from __future__ import annotations

from ..instrument import Interception, is_sharded
from ..run.context import RunContext
from .splitting import KnownSizes, Lockstep, Passes, SplitCalls, SplitGeneration


class SplitModels:
    """
    Has every call of a trainer's models go through [`SplitCalls`], from where it is asked to until it is released.

    Args:
        run ([`RunContext`]):
            The run.
        sizes ([`KnownSizes`]):
            Which sizes fit.
    """

    def __init__(self, run: RunContext, sizes: KnownSizes) -> None:
        self._run = run
        self._sizes = sizes
        self._splits: list[SplitCalls] = []
        self._interceptions: list[Interception] = []
        self._passes: Passes | None = None

    def watch(self) -> None:
        """Begins to split calls that are known not to fit, where they can be split."""
        instrument, sizes = self._run.instrument, self._sizes
        view = instrument.view
        if self._splits or not view.can_split_calls:
            return
        sizes.made_together |= bool(instrument.one_rank.meets_in_forward)
        lockstep = Lockstep(view.device) if view.sharded else None
        self._passes = Passes(instrument.objective.paired, lockstep) if view.may_repeat_the_loss else None
        for model in view.models():
            together = lockstep if is_sharded(model) else None
            calls = SplitCalls(model, sizes, view.uses_only_the_loss, self._passes, view.autocast_dtype, together)
            self._interceptions.append(instrument.intercept_calls(model, calls.call))
            if hasattr(model, "generate"):
                generation = SplitGeneration(model, sizes, calls, together)
                self._interceptions.append(instrument.intercept(model, "generate", generation.call))
            self._splits.append(calls)

    def leave_alone(self) -> None:
        """Gives the models their own calls back."""
        self._run.instrument.release_calls(self._interceptions)
        self._splits, self._interceptions, self._passes = [], [], None

    @property
    def passes(self) -> Passes | None:
        """Those that training steps are computed in, where their calls are split; `None` where they are not."""
        return self._passes if self._passes is not None and self._passes.wanted else None

    @property
    def pieces(self) -> int:
        """Most pieces a call was split into."""
        return max((calls.pieces for calls in self._splits), default=1)

    def count_from_here(self) -> None:
        """Forgets how many pieces calls were split into so far."""
        for calls in self._splits:
            calls.pieces = 1

    @property
    def given_up(self) -> bool:
        """Whether some calls are not split any more."""
        return any(calls.given_up for calls in self._splits)

    @property
    def refusals(self) -> list[str]:
        """Why calls could not be split, oldest first."""
        return [calls.refused for calls in self._splits if calls.refused]

    def forget_refusals(self) -> None:
        """Begins with another incident."""
        for calls in self._splits:
            calls.refused = ""

    def on_success(self) -> None:
        """Takes in that what was split has been computed."""
        if self._splits:
            self._sizes.on_success()
        for calls in self._splits:
            calls.on_success()
