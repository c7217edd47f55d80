"""The engine generates nothing while weights change."""

from __future__ import annotations

import threading
import time

from ctrl_megatron.rollout.decoding import PauseControl


class Stepper:
    """A thread that steps until its work must end."""

    def __init__(self, control: PauseControl) -> None:
        self.control, self.token, self.steps = control, control.begin_work(), 0
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while self.control.begin_step(self.token):
            self.steps += 1
            time.sleep(0.001)
            self.control.end_step()

    def wait_for_steps(self, count: int) -> None:
        deadline = time.monotonic() + 20
        while self.steps < count and time.monotonic() < deadline:
            time.sleep(0.001)
        assert self.steps >= count


def test_no_request_steps_in_a_pause_and_all_continue_afterwards() -> None:
    control = PauseControl()
    stepper = Stepper(control)
    stepper.wait_for_steps(3)
    control.pause(abort=False)
    held = stepper.steps
    time.sleep(0.05)
    assert stepper.steps == held and control.is_paused
    control.resume()
    stepper.wait_for_steps(held + 3)
    control.pause(abort=True)
    stepper.thread.join(20)
    assert not stepper.thread.is_alive()


def test_an_abort_ends_what_had_begun_and_holds_what_comes_later() -> None:
    control = PauseControl()
    control.pause(abort=False)
    early = Stepper(control)
    control.pause(abort=True)
    early.thread.join(20)
    late = Stepper(control)
    assert early.steps == 0 and not early.thread.is_alive() and late.thread.is_alive()
    control.resume()
    late.wait_for_steps(1)
    control.cancel(late.token)
    late.thread.join(20)
    assert not late.thread.is_alive() and not control.is_paused
