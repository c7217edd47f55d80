"""Right outputs whose format matters, mutations of their format, and the verdict of each rule.

Pure. ``means_the_same`` is written a second time, apart from ``problems.comparison``: with
fractions instead of decimals, bytes instead of patterns.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

RULES: dict[str, tuple[Fraction, Fraction]] = {
    "strict": (Fraction(0), Fraction(0)),
    "tokens": (Fraction(0), Fraction(0)),
    "livecodebench": (Fraction(0), Fraction(0)),
    "code_contests": (Fraction("1e-5"), Fraction(0)),
    "apps": (Fraction("1e-5"), Fraction(0)),
    "float:1e-6": (Fraction("1e-6"), Fraction("1e-6")),
    "absolute:0.001": (Fraction("1e-3"), Fraction(0)),
    "relative:1e-9": (Fraction(0), Fraction("1e-9")),
}
"""Rule -> tolerance of numbers, absolute and relative."""
RESULT_RULES = {"livecodebench": (Fraction("1e-5"), Fraction(0)), "strict": RULES["strict"]}
"""Rule -> tolerance of results of functions, absolute and relative."""


def right_outputs(count: int, seed: int = 0) -> Iterator[str]:
    """So many outputs of tasks whose format is part of them, or may be taken for it."""
    draw = random.Random(seed)
    kinds: list[Callable[[], str]] = [
        lambda: str(draw.randint(1, 10**6))[::-1].zfill(7),
        lambda: f"{draw.randint(0, 9):03d} {draw.randint(10, 99):05d}",
        lambda: f"{draw.randint(1, 10**8) / 100:.2f}",
        lambda: f"{draw.uniform(0, 1):.6f} {draw.uniform(-50, 50):.9f}",
        lambda: f"{draw.randint(1, 99)}.50\n{draw.randint(1, 99)}.00",
        lambda: f"{draw.uniform(1, 9):.3e}\n{draw.randint(1, 9)}e+{draw.randint(10, 20)}",
        lambda: f"{draw.randint(1, 9)}e{draw.randint(1, 9)}{draw.choice('0123456789abc')}",
        lambda: f"{draw.getrandbits(64):016x}",
        lambda: f"{draw.getrandbits(24):b}".zfill(24),
        lambda: "\n".join(" " * (4 - i) + "*" * (2 * i + 1) for i in range(draw.randint(2, 5))),
        lambda: "\n".join(f"{i:>4} {i * i:>6}" for i in range(draw.randint(2, 5))),
        lambda: f"20{draw.randint(10, 30)}-0{draw.randint(1, 9)}-0{draw.randint(1, 9)} 07:05",
        lambda: f"{draw.randint(1, 300)} cm\n{draw.randint(1, 99)}%",
        lambda: f"{draw.randint(1, 9)}/{draw.randint(2, 9)} {draw.randint(1000, 10**7):,}",
        lambda: f"{draw.randint(2**53, 2**63)}\n-{draw.randint(2**53, 2**63)}",
        lambda: f"{draw.randint(10**400, 10**401)}",
        lambda: draw.choice(["YES\nno", "Yes\nNo\nMaybe", "True", "Case #1: YES 3"]),
        lambda: "\n".join(" ".join(str(draw.randint(-9, 9)) for _ in "abc") for _ in "ab"),
        lambda: f"a  b\n\n{draw.randint(1, 9)} c",
        lambda: f"{draw.choice(['nan', 'inf', '-0.0'])} {draw.randint(1, 9)}.0",
    ]
    for number in range(count):
        yield kinds[number % len(kinds)]()


def _each_number(change: Callable[[str], str]) -> Callable[[str], str]:
    return lambda text: re.sub(r"[0-9]+(?:\.[0-9]+)?", lambda found: change(found[0]), text)


def _last_number(change: Callable[[str], str]) -> Callable[[str], str]:
    last = r"([0-9]+(?:\.[0-9]+)?)(?=[^0-9]*$)"
    return lambda text: re.sub(last, lambda found: change(found[0]), text, count=1)


def _moved(step: str) -> Callable[[str], str]:
    """A number plus a step, with as many decimals as the sum needs."""

    def move(number: str) -> str:
        value = Fraction(number) + Fraction(step)
        digits = str(abs(value * 10**12).__floor__()).zfill(13)
        decimals = digits[-12:].rstrip("0") or "0"
        return f"{'-' * (value < 0)}{digits[:-12]}.{decimals}"

    return move


def _fullwidth(text: str) -> str:
    return text.translate({ord("0") + i: ord("\N{FULLWIDTH DIGIT ZERO}") + i for i in range(10)})


MUTATIONS: dict[str, Callable[[str], str]] = {
    "leading zero": _each_number(lambda n: f"0{n}"),
    "no leading zeros": _each_number(lambda n: n.lstrip("0") or "0"),
    "plus": _last_number(lambda n: f"+{n}"),
    "minus": _last_number(lambda n: f"-{n}"),
    "point": _each_number(lambda n: n if "." in n else f"{n}."),
    "point zero": _each_number(lambda n: n if "." in n else f"{n}.0"),
    "more zeros": _each_number(lambda n: f"{n}00" if "." in n else n),
    "fewer zeros": _each_number(lambda n: n.rstrip("0") if "." in n else n),
    "no decimals": _each_number(lambda n: n.split(".")[0]),
    "one decimal less": _each_number(lambda n: n[:-1] if "." in n else n),
    "no zero before the point": _each_number(lambda n: n.removeprefix("0") if "." in n else n),
    "comma for point": lambda text: text.replace(".", ","),
    "exponent": _last_number(lambda n: f"{n}e0"),
    "signed exponent": _last_number(lambda n: f"{n}e+00"),
    "ten times by exponent": _last_number(lambda n: f"{n}e+01"),
    "long exponent": _last_number(lambda n: f"{n}e+0000"),
    "as a float": _each_number(lambda n: f"{float(n):.17g}" if len(n) < 300 else n),
    "six digits": _each_number(lambda n: f"{float(n):.6g}" if len(n) < 300 else n),
    "one more": _last_number(lambda n: _moved("1")(n) if "." in n else str(int(n) + 1)),
    "one less": _last_number(lambda n: _moved("-1")(n) if "." in n else str(int(n) - 1)),
    "last digit": lambda text: re.sub(
        "[0-9](?=[^0-9]*$)", lambda found: str((int(found[0]) + 1) % 10), text, count=1
    ),
    **{
        f"off by {step}": _last_number(_moved(step))
        for step in ("1e-12", "-1e-9", "9e-7", "9e-6", "-11e-6", "1e-4", "9e-4", "-11e-4", "0.01")
    },
    "underscores": _each_number(lambda n: re.sub("(?<=[0-9])(?=(...)+$)", "_", n)),
    "thousands": _each_number(lambda n: f"{int(n):,}" if "." not in n else n),
    "no thousands": lambda text: text.replace(",", ""),
    "other digits": _fullwidth,
    "other minus": lambda text: text.replace("-", "\N{MINUS SIGN}"),
    "hexadecimal": _last_number(lambda n: hex(int(n)) if "." not in n else n),
    "a quotient": _last_number(lambda n: f"{n}/1"),
    "inf": _last_number(lambda n: "inf"),
    "nan": _last_number(lambda n: "nan"),
    "huge": _last_number(lambda n: "9" * 400),
    "no unit": lambda text: re.sub(" ?(cm|%|:)", "", text),
    "other unit": lambda text: text.replace("cm", "mm").replace("%", " %"),
    "capitals": str.swapcase,
    "upper case": str.upper,
    "no margin": lambda text: "\n".join(line.lstrip() for line in text.split("\n")),
    "margin": lambda text: "\n".join(f" {line}" for line in text.split("\n")),
    "space at ends": lambda text: "\n".join(f"{line} \t" for line in text.split("\n")),
    "other breaks": lambda text: text.replace("\n", "\r\n"),
    "breaks at the end": lambda text: f"{text}\n\n \n",
    "break at the front": lambda text: f"\n{text}",
    "wide spaces": lambda text: text.replace(" ", "  "),
    "tabs": lambda text: text.replace(" ", "\t"),
    "hard spaces": lambda text: text.replace(" ", "\N{NO-BREAK SPACE}"),
    "no spaces": lambda text: text.replace(" ", ""),
    "one line": lambda text: text.replace("\n", " "),
    "a word a line": lambda text: "\n".join(text.split()),
    "blank lines": lambda text: text.replace("\n", "\n\n"),
    "no blank lines": lambda text: text.replace("\n\n", "\n"),
    "lines in reverse": lambda text: "\n".join(reversed(text.split("\n"))),
    "words in reverse": lambda text: "\n".join(
        " ".join(reversed(line.split(" "))) for line in text.split("\n")
    ),
    "first line": lambda text: text.split("\n")[0],
    "last line": lambda text: text.split("\n")[-1],
    "a line twice": lambda text: f"{text}\n{text.split(chr(10))[-1]}",
    "another word": lambda text: f"{text} 0",
    "quotes": repr,
    "brackets": lambda text: f"[{text}]",
    "nothing": lambda text: "",
}


def means_the_same(got: str, want: str, rule: str) -> bool:
    """Whether ``rule``, as documented, accepts the output ``got`` where ``want`` is expected."""
    left, right = got.encode(), want.encode()
    if rule == "strict":
        return _ends_cut(left) == _ends_cut(right)
    if rule in ("livecodebench", "apps"):
        lines = [_lines(text, blank=rule == "livecodebench") for text in (left, right)]
    else:
        lines = [[b" ".join(text.split())] for text in (left, right)]
    return len(lines[0]) == len(lines[1]) and all(
        map(_same_value_line if rule == "livecodebench" else _near_line(rule), *lines)
    )


def _ends_cut(text: bytes) -> bytes:
    return b"\n".join(line.rstrip() for line in text.split(b"\n")).rstrip(b"\n")


def _lines(text: bytes, *, blank: bool) -> list[bytes]:
    lines = [line.strip() for line in text.strip().split(b"\n")]
    return [line for line in lines if line or blank]


def _same_value_line(got: bytes, want: bytes) -> bool:
    if got == want:
        return True
    left, right = ([_value(word) for word in line.split()] for line in (got, want))
    return None not in (*left, *right) and left == right


def _near_line(rule: str) -> Callable[[bytes, bytes], bool]:
    absolute, relative = RULES[rule]

    def near(got: bytes, want: bytes) -> bool:
        return got == want or (
            rule != "tokens" and not _is_code(got) and not _is_code(want) and close(got, want)
        )

    def close(got: bytes, want: bytes) -> bool:
        left, right = _value(got), _value(want)
        if left is None or right is None:
            return False
        whole = all(word.lstrip(b"+-").isdigit() for word in (got, want))
        most = Fraction(0) if whole else max(absolute, relative * abs(right))
        return abs(left - right) <= most

    def lines(got: bytes, want: bytes) -> bool:
        left, right = got.split(), want.split()
        return len(left) == len(right) and all(map(near, left, right))

    return lines


def _is_code(word: bytes) -> bool:
    digits = word.lstrip(b"+-")
    head, mark, exponent = digits.lower().partition(b"e")
    bare = bool(mark) and head.isdigit() and exponent[:1].isdigit()
    return bare or (digits[:1] == b"0" and digits[1:2].isdigit())


def _value(word: bytes) -> Fraction | None:
    """A finite number in ASCII with an exponent of at most three digits."""
    head, mark, exponent = word.lower().partition(b"e")
    sign = exponent[1:] if exponent[:1] in (b"+", b"-") else exponent
    whole, _, decimals = (head[1:] if head[:1] in (b"+", b"-") else head).partition(b".")
    digits = whole + decimals
    if not digits.isdigit() or (mark and not (sign.isdigit() and len(sign) <= 3)):
        return None
    value = int(digits) * Fraction(10) ** (int(exponent or b"0") - len(decimals))
    return -value if head[:1] == b"-" else value


def right_results(count: int, seed: int = 0) -> Iterator[Any]:
    """So many values that JSON can hold, as functions return them."""
    draw = random.Random(seed)
    kinds: list[Callable[[], Any]] = [
        lambda: draw.randint(-(10**6), 10**6),
        lambda: round(draw.uniform(-10, 10), 5),
        lambda: draw.randint(2**53, 2**70),
        lambda: [round(draw.uniform(0, 1), 5) for _ in range(draw.randint(1, 4))],
        lambda: [[draw.randint(0, 9), round(draw.uniform(0, 9), 3)], "a b"],
        lambda: str(draw.randint(0, 999)).zfill(5),
        lambda: draw.choice([True, False, None, "", []]),
        lambda: [draw.randint(-9, 9) for _ in range(draw.randint(1, 4))],
    ]
    for number in range(count):
        yield kinds[number % len(kinds)]()


def _each_leaf(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def changed(value: Any) -> Any:
        return [changed(item) for item in value] if isinstance(value, list) else change(value)

    return changed


def _each_float(step: float) -> Callable[[Any], Any]:
    return _each_leaf(lambda value: value + step if isinstance(value, float) else value)


RESULT_MUTATIONS: dict[str, Callable[[Any], Any]] = {
    "text": str,
    "texts": _each_leaf(str),
    "floats": _each_leaf(lambda v: float(v) if type(v) is int else v),
    "integers": _each_leaf(lambda v: int(v) if type(v) is float else v),
    "numbers of texts": _each_leaf(lambda v: int(v) if type(v) is str and v.isdigit() else v),
    **{f"off by {step:g}": _each_float(step) for step in (1e-12, 1e-9, 9e-6, -11e-6, 1e-4, 0.01)},
    "one more": _each_leaf(lambda v: v + 1 if isinstance(v, (int, float)) else v),
    "a little more": _each_leaf(lambda v: v + 1e-6 if isinstance(v, (int, float)) else v),
    "minus": _each_leaf(lambda v: -v if isinstance(v, (int, float)) else v),
    "truth": _each_leaf(bool),
    "inf": _each_leaf(lambda v: float("inf") if isinstance(v, float) else v),
    "nan": _each_leaf(lambda v: float("nan") if isinstance(v, float) else v),
    "tuples": lambda v: tuple(v) if isinstance(v, list) else (v,),
    "list": lambda v: [v],
    "item": lambda v: v[0] if isinstance(v, list) and v else v,
    "reverse": lambda v: v[::-1] if isinstance(v, (list, str)) else v,
    "shorter": lambda v: v[:-1] if isinstance(v, (list, str)) else v,
    "twice": lambda v: v * 2 if isinstance(v, (list, str)) else v,
    "None": lambda v: None,
    "capitals": _each_leaf(lambda v: v.swapcase() if isinstance(v, str) else v),
}


def results_the_same(got: Any, want: Any, rule: str) -> bool:
    """Whether ``rule``, as documented, accepts the returned value ``got`` where ``want`` is
    expected. Python's numbers are equal to truth values of the same number.
    """
    absolute, _ = RESULT_RULES[rule]
    if isinstance(want, list):
        return (
            isinstance(got, (list, tuple))
            and len(got) == len(want)
            and all(results_the_same(g, w, rule) for g, w in zip(got, want, strict=True))
        )
    if type(want) is float and type(got) in (int, float):
        finite = got == got and abs(got) != float("inf")
        return finite and abs(Fraction(got) - Fraction(want)) <= absolute
    return bool(got == want)
