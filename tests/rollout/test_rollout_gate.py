"""Nobody generates while weights change."""

from __future__ import annotations

import threading
import time

from ctrl_megatron.rollout.gate import Gate


class Walker:
    """A thread that passes a gate until it is refused."""

    def __init__(self, gate: Gate) -> None:
        self.gate, self.ticket, self.steps = gate, gate.ticket(), 0
        self.thread = threading.Thread(target=self._walk, daemon=True)
        self.thread.start()

    def _walk(self) -> None:
        while self.gate.enter(self.ticket):
            self.steps += 1
            time.sleep(0.001)
            self.gate.leave()

    def wait_for_steps(self, count: int) -> None:
        deadline = time.monotonic() + 20
        while self.steps < count and time.monotonic() < deadline:
            time.sleep(0.001)
        assert self.steps >= count


def test_nobody_passes_a_closed_gate_and_all_go_on_when_it_opens() -> None:
    gate = Gate()
    walker = Walker(gate)
    walker.wait_for_steps(3)
    gate.close(abort=False)
    held = walker.steps
    time.sleep(0.05)
    assert walker.steps == held and not gate.is_open
    gate.open()
    walker.wait_for_steps(held + 3)
    gate.close(abort=True)
    walker.thread.join(20)
    assert not walker.thread.is_alive()


def test_an_abort_ends_what_had_begun_and_holds_what_comes_later() -> None:
    gate = Gate()
    gate.close(abort=False)
    early = Walker(gate)
    gate.close(abort=True)
    early.thread.join(20)
    late = Walker(gate)
    assert early.steps == 0 and not early.thread.is_alive() and late.thread.is_alive()
    gate.open()
    late.wait_for_steps(1)
    gate.revoke(late.ticket)
    late.thread.join(20)
    assert not late.thread.is_alive() and gate.is_open
