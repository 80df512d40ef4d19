"""Run by doctor/test_doctor.py, once for each rank: `self-healing doctor`, where one device may be wrong."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any
from unittest import mock

from wrong_product import WrongProduct

from self_healing.tools import doctor_machine
from self_healing.tools.cli import app


if __name__ == "__main__":
    fault, on = sys.argv.pop(1), int(os.environ["RANK"]) == 1
    wrapped = doctor_machine.check_device

    def wrong(*args: Any) -> Any:
        with WrongProduct():
            return wrapped(*args)

    vars(doctor_machine)["_MEETING"] = 15.0
    struck = on and fault == "wrong"
    with mock.patch.object(doctor_machine, "check_device", wrong) if struck else contextlib.nullcontext():
        app(prog_name="self-healing")
