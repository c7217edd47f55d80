"""A few critiques with what they led to."""

from __future__ import annotations

from html import escape
from typing import Any

_SHOWN = 6


def choose(examples: list[dict[str, Any]], count: int = _SHOWN) -> list[dict[str, Any]]:
    """Examples of as many different outcomes as there are, newest first within each outcome."""
    outcomes: dict[str, list[dict[str, Any]]] = {}
    for example in sorted(examples, key=lambda e: -int(e.get("step", 0))):
        outcomes.setdefault(_outcome(example), []).append(example)
    queues = [outcomes[key] for key in sorted(outcomes)]
    depth = max(map(len, queues), default=0)
    return [queue[i] for i in range(depth) for queue in queues if i < len(queue)][:count]


def examples_section(examples: list[dict[str, Any]] | None) -> str:
    """The chosen examples as cards."""
    if not examples:
        return '<div class="card"><div class="missing">examples.jsonl: not recorded</div></div>'
    return "".join(_card(example) for example in choose(examples))


def _outcome(example: dict[str, Any]) -> str:
    """A sort key: what the revision changed, repairs first."""
    before, after = example.get("passed_before"), example.get("passed_after")
    if before is None or after is None:
        return "3 unknown"
    if float(after) == float(before):
        return "2 same"
    return "0 up" if float(after) > float(before) else "1 down"


def _card(example: dict[str, Any]) -> str:
    chips = [
        _verdict("before", example.get("passed_before")),
        _verdict("after", example.get("passed_after")),
        _plain_chip("judgment", example.get("judgment")),
        _plain_chip("reward", example.get("reward")),
    ]
    versions = example.get("versions")
    if isinstance(versions, dict):
        chips += [_plain_chip(f"{part} by", version) for part, version in versions.items()]
    elif versions is not None:
        chips.append(_plain_chip("weights", versions))
    detail = _detail(example.get("detail"))
    return (
        f'<div class="card example"><header><span class="step">step '
        f"{escape(str(example.get('step', 'not recorded')))}</span>{''.join(chips)}</header>"
        f'<div class="stack">{_part("Problem", example.get("problem"))}</div>'
        f'<div class="pair">{_part("First solution", example.get("solution"))}'
        f"{_part('Critique', example.get('critique'))}"
        f"{_part('Revision', example.get('revision'))}"
        f"{_part('Sandbox', detail) if detail else ''}</div></div>"
    )


def _detail(value: object) -> object:
    """One line per test; an empty text means that the test passed."""
    if not isinstance(value, list):
        return value
    return "\n".join(f"test {i}: {text or 'passed'}" for i, text in enumerate(value, start=1))


def _part(title: str, value: object) -> str:
    shown = "not recorded" if value is None else str(value)
    return f'<div><div class="part">{title}</div><pre>{escape(shown)}</pre></div>'


def _verdict(when: str, value: object) -> str:
    if value is None:
        return f'<span class="chip">{when}: not recorded</span>'
    rate = float(value)  # type: ignore[arg-type]  # True and 1.0 both mean that everything passed
    text = "passed" if rate == 1 else "failed" if rate == 0 else f"{rate:.0%} passed"
    return f'<span class="chip {"good" if rate == 1 else "bad"}">{when}: {text}</span>'


def _plain_chip(name: str, value: object) -> str:
    text = "not recorded" if value is None else value
    shown = f"{text:.3g}" if isinstance(text, float) else str(text)
    return f'<span class="chip">{escape(name)}: {escape(shown)}</span>'
