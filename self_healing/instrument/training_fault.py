"""`TrainingFault`: an exception of the user's training code, on its way out of this library."""

from __future__ import annotations

from ..failures.classify import text_of


class TrainingFault(Exception):
    """Carries an exception of the user's training code out of this library, so that it is not taken for our bug."""

    def __init__(self, error: Exception, others_wait: bool = False, others_know: bool = False) -> None:
        super().__init__(text_of(error))
        self.error = error
        self.others_wait = others_wait
        self.others_know = others_know
