"""What sizes of model calls fitted, and which did not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


Kind = Literal["train", "forward", "generate"]


@dataclass(frozen=True, slots=True)
class CallShape:
    """
    The size of one model call.

    Args:
        kind (`"train"`, `"forward"` or `"generate"`):
            With or without gradients, or generation.
        rows (`int`):
            Rows, B; of a flattened batch its tokens.
        length (`int`):
            Padded length, T, in tokens (of generation: with what may be generated); 1 for a flattened batch.
    """

    kind: Kind
    rows: int
    length: int

    def __str__(self) -> str:
        rows = "1 row" if self.rows == 1 else f"{self.rows} rows"
        return f"{self.rows} tokens" if self.length == 1 else f"{rows} x {self.length}"


@dataclass(slots=True)
class _Frontier:
    """
    What is known of one kind of call.

    Args:
        wait (`int`):
            Optimizer steps from a failure to the next try of a larger size.
        next_probe (`int`):
            The first step at which one is tried.
        fits (`list[tuple[int, int]]`), fails (`list[tuple[int, int]]`):
            The largest sizes that did fit, the smallest that did not: rows and length.
    """

    wait: int
    next_probe: int = 0
    fits: list[tuple[int, int]] = field(default_factory=list)
    fails: list[tuple[int, int]] = field(default_factory=list)

    def fit(self, rows: int, length: int) -> bool:
        """Takes in a size that fitted; whether that is news."""
        if any(r >= rows and n >= length for r, n in self.fits):
            return False
        self.fits = [(r, n) for r, n in self.fits if not (r <= rows and n <= length)] + [(rows, length)]
        self.fails = [(r, n) for r, n in self.fails if not (r <= rows and n <= length)]
        return True

    def fail(self, rows: int, length: int) -> None:
        """Takes in a size that did not."""
        self.fits = [(r, n) for r, n in self.fits if not (r >= rows and n >= length)]
        self.fails = [(r, n) for r, n in self.fails if not (r >= rows and n >= length)] + [(rows, length)]

    def most(self, length: int) -> int:
        """The most rows of this length that are known to fit; 0 if none are."""
        return max((r for r, n in self.fits if n >= length), default=0)

    def fewest(self, length: int) -> int | None:
        """The fewest rows of this length that are known to fail; `None` if none are."""
        return min((r for r, n in self.fails if n <= length), default=None)


class SizeMemory:
    """
    What sizes of model calls fitted and which did not, and with it how many rows of the next one may run at a time.

    Sizes are compared in both directions at once (as many rows *and* as long): memory grows linearly with one and
    faster than that with the other, so their product alone says too little.

    Before anything has failed, everything is allowed. After that only what is known to fit is, and one row where
    nothing is (in generation and evaluation half of what failed); a larger size is tried again after `probe_steps`
    optimizer steps, later after twice as many whenever that failed. Each kind of call waits by itself.

    Args:
        probe_steps (`int`):
            Optimizer steps until a larger size is tried again.
    """

    def __init__(self, probe_steps: int) -> None:
        self._base_wait = probe_steps
        self._frontiers: dict[Kind, _Frontier] = {
            "train": _Frontier(probe_steps),
            "forward": _Frontier(probe_steps),
            "generate": _Frontier(probe_steps),
        }
        # Kinds in which what failed is halved until it fits; in the others the next attempt has to.
        self._halving: set[Kind] = {"generate"}
        self._step = 0
        self._restored = False
        self._seen: list[CallShape] = []
        # The kind that tries a larger size, and how many rows were known to fit.
        self._probing: tuple[Kind, int] | None = None
        self.begun: dict[Kind, CallShape] = {}
        self.last_begun: CallShape | None = None
        self.changed = False

    @property
    def limits(self) -> bool:
        """Whether anything has ever failed."""
        return any(frontier.fails for frontier in self._frontiers.values())

    def begin_step(self, step: int) -> None:
        """An optimizer step begins."""
        self._step = step
        if self._restored:
            self._restored = False
            for frontier in self._frontiers.values():
                frontier.next_probe = step + frontier.wait

    def rows_for(self, shape: CallShape) -> int:
        """How many rows of a call of this size may run at a time, at least 1."""
        if not any(frontier.fails for frontier in self._frontiers_for(shape.kind)):
            return shape.rows
        known = self._known(shape)
        frontier = self._frontiers[shape.kind]
        if known < shape.rows and self._probing is None and self._step >= frontier.next_probe:
            self._probing = (shape.kind, known)
            return self._larger(shape, known)
        return known

    def _frontiers_for(self, kind: Kind) -> tuple[_Frontier, ...]:
        """Without gradients a call needs no more than with; how much less is only known once it has run."""
        own = self._frontiers[kind]
        return (own, self._frontiers["train"]) if kind == "forward" else (own,)

    def _known(self, shape: CallShape) -> int:
        """How many of its rows are known to fit; 1 where nothing is known."""
        most = max(frontier.most(shape.length) for frontier in self._frontiers_for(shape.kind))
        if most == 0 and shape.kind in self._halving:
            # One row at a time would take as many times as long as there are rows, which generation does not forgive.
            fewest = min((rows for rows, _ in self._frontiers[shape.kind].fails), default=2)
            return max(min(fewest // 2, shape.rows), 1)
        # What has failed itself counts more than what fitted with gradients (another model, another state of memory).
        failed = self._frontiers[shape.kind].fewest(shape.length)
        if failed is not None:
            most = min(most, failed - 1)
        return max(min(most, shape.rows), 1)

    def _larger(self, shape: CallShape, known: int) -> int:
        """
        The next size to try, of those that a call falls into evenly: up to twice as large and not known to fail, and
        when there is none left the next larger, which failed and may fit by now.
        """
        pieces = -(-shape.rows // known)
        larger = sorted({-(-shape.rows // fewer) for fewer in range(-(-pieces // 2), pieces)})
        failed = min(
            (rows for rows in (each.fewest(shape.length) for each in self._frontiers_for(shape.kind)) if rows),
            default=shape.rows + 1,
        )
        open_ = [rows for rows in larger if known < rows < failed]
        if open_:
            # Half-way to what failed.
            return open_[-1] if failed > 2 * known else open_[len(open_) // 2]
        return next(rows for rows in larger if rows > known)

    def begins(self, shape: CallShape) -> None:
        """A call of this size begins; if it does not fit, this is the one."""
        self.begun[shape.kind] = self.last_begun = shape

    def ran(self, shape: CallShape) -> None:
        """A call of this size came through its forward pass; what is known of it waits for its backward."""
        self._seen.append(shape)

    def came_through(self) -> None:
        """Everything that ran since the last failure fitted, backward included."""
        if not self._seen:
            return
        seen, self._seen = self._seen, []
        if not self.limits:
            return
        for shape in seen:
            self.changed |= self._frontiers[shape.kind].fit(shape.rows, shape.length)
        if self._probing is not None:
            kind, known = self._probing
            frontier = self._frontiers[kind]
            if any(shape.kind == kind and shape.rows > known for shape in seen):
                # Growing as long as it goes well.
                frontier.wait = self._base_wait
            # Else it could not be tried: a call that is not split, sequences that do not fill a chunk.
            frontier.next_probe = self._step + 1
            self._probing = None

    def failed(self, shape: CallShape, with_gradients: bool = True) -> None:
        """
        A call of this size did not fit.

        Args:
            shape ([`CallShape`]):
                The size.
            with_gradients (`bool`, *optional*, defaults to `True`):
                Whether that says something about calls with gradients: not where it was an evaluation that failed.
        """
        self._seen.clear()
        self._frontiers[shape.kind].fail(shape.rows, shape.length)
        if not with_gradients:
            self._halving.add(shape.kind)
        waiting = {shape.kind}
        if with_gradients and shape.kind == "forward" and self._frontiers["train"].most(shape.length) < shape.rows:
            # With gradients it needs more; unless it did fit, and another model is the larger one.
            self._frontiers["train"].fail(shape.rows, shape.length)
            waiting.add("train")
        if self._probing is not None:
            kind, _ = self._probing
            self._frontiers[kind].wait *= 2
            waiting.add(kind)
        self._probing = None
        for kind in waiting:
            self._frontiers[kind].next_probe = self._step + self._frontiers[kind].wait
        if shape.kind == "train":
            # Calls without gradients go by what failed with them.
            forward = self._frontiers["forward"]
            forward.next_probe = max(forward.next_probe, self._step + forward.wait)
        self.changed = True

    def is_probe(self) -> bool:
        """Whether a size that is larger than what is known to fit is being tried."""
        return self._probing is not None

    def forget_attempt(self) -> None:
        """What ran since the last failure says nothing: it runs again."""
        self._seen.clear()

    def more_room(self) -> None:
        """Less memory is needed per row from now on: what failed may fit."""
        for kind in ("train", "forward"):
            frontier = self._frontiers[kind]
            if frontier.fails:
                # A size nobody has: it says that something did fail, and so that only what is known to fit is safe.
                frontier.fails = [(1 << 30, 1 << 30)]
            frontier.wait, frontier.next_probe = self._base_wait, self._step + 1
        self._probing = None
        self.changed = True

    def state_dict(self) -> dict[str, Any]:
        """What is known, as JSON."""
        return {kind: {"fits": frontier.fits, "fails": frontier.fails} for kind, frontier in self._frontiers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what an earlier process knew."""
        for kind, frontier in self._frontiers.items():
            known = state.get(kind, {})
            frontier.fits = [(int(r), int(n)) for r, n in known.get("fits", [])]
            frontier.fails = [(int(r), int(n)) for r, n in known.get("fails", [])]
        self._restored = True
