"""sanitize and desanitize against the table of CTRL's behaviour and against the regular expressions
it implies.
"""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ctrl_megatron.prompts import desanitize, extract_code, fence_code, sanitize, sanitized_answer
from ctrl_megatron.prompts.code_block import without_reasoning

CANONICAL = "```python\nx = 1\n```"
ORIGINAL = object()

SANITIZE = {
    "prose around": ("Here:\n```python\nx = 1\n```\nDone.", CANONICAL),
    "no tag": ("```\nx = 1\n```", CANONICAL),
    "upper-case tag": ("```PYTHON\nx = 1\n```", CANONICAL),
    "one-line block": ("```x = 1```", CANONICAL),
    "code directly after the tag": ("```pythonx = 1\n```", CANONICAL),
    "CRLF": ("```python\r\nx = 1\r\ny = 2\r\n```", "```python\nx = 1\r\ny = 2\n```"),
    "unclosed": ("```python\nx = 1", CANONICAL),
    "unclosed, final newline": ("```python\nx = 1\n", CANONICAL),
    "two blocks": ("```python\nx = 1\n```\n```python\ny = 2\n```", CANONICAL),
    "empty block": ("a ```python\n``` b", ORIGINAL),
    "white-space block": ("```python\n \t\n\n```", ORIGINAL),
    "empty block, then a full one": ("```\n```\n```python\nx = 1\n```", ORIGINAL),
    "py tag leaks": ("```py\nx = 1\n```", "```python\npy\nx = 1\n```"),
    "python3 tag leaks": ("```python3\nx = 1\n```", "```python\n3\nx = 1\n```"),
    "cpp tag leaks": ("```cpp\nx = 1\n```", "```python\ncpp\nx = 1\n```"),
    "first line indented": (
        "```python\n    a = 1\n    b = 2\n```",
        "```python\na = 1\n    b = 2\n```",
    ),
    "blank before the closing fence": ("```python\nx = 1\n\n  ```", CANONICAL),
    "no fence": ("  x = 1\n", ORIGINAL),
    "empty string": ("", ORIGINAL),
}

DESANITIZE = {
    "closed": ("p\n```python\nx = 1\n```\nq", "x = 1"),
    "no tag": ("```\n x = 1 \n```", "x = 1"),
    "upper-case tag": ("```Python\nx = 1```", "x = 1"),
    "empty block": ("```python\n```", ""),
    "white-space block": ("``` \n ```", ""),
    "unclosed": (" ```python\nx = 1\n", ORIGINAL),
    "no fence": ("  x = 1\n", ORIGINAL),
    "two blocks": ("```\nx = 1\n```\n```\ny = 2\n```", "x = 1"),
    "cpp tag leaks": ("```cpp\nx = 1\n```", "cpp\nx = 1"),
}

PROGRAMS = {
    "a space before the tag": ("``` python\nx = 1\n```", "x = 1"),
    "py": ("Sure.\n```py\nx = 1\n```\nDone.", "x = 1"),
    "Python3, CRLF": ("```Python3 \r\nx = 1\r\n```", "x = 1"),
    "py3, open": ("```py3\nx = 1", "x = 1"),
    "a name that begins like a tag": ("```py = 1```", "py = 1"),
    "in a list": (
        "1. So:\n   ```python\n   x = 1\n   if x:\n       y = 2\n   ```",
        "x = 1\nif x:\n    y = 2",
    ),
    "behind a list's number": ("1. ```python\n   x = 1\n   y = 2\n   ```", "x = 1\ny = 2"),
    "indented, after a blank line": ("```\n\n  x = 1\n\n  y = 2\n```", "x = 1\n\ny = 2"),
    "spaces that belong to a text": ('```python\nx = """\n   \n"""\n```', 'x = """\n   \n"""'),
    "another language": ("```cpp\nx = 1\n```", "x = 1"),
    "four backticks": ("````python\nx = 1\n````", "x = 1"),
    "tildes": ("~~~python\nx = 1\n~~~", "x = 1"),
    "tildes, open": ("~~~\nx = 1", "x = 1"),
    "tildes around backticks": ('~~~\nx = """\n```\n"""\n~~~', 'x = """\n```\n"""'),
    "attributes": ("```python {.numberLines}\nx = 1\n```", "x = 1"),
    "pandoc's attributes": ("``` {.python .numberLines}\nx = 1\n```", "x = 1"),
    "a title": ('```python title="x.py"\nx = 1\n```', "x = 1"),
    "knitr": ("```{python}\nx = 1\n```", "x = 1"),
    "text": ("```text\nx = 1\n```", "x = 1"),
    "a quote": ("> So:\n> ```python\n> if x:\n>     y = 1\n> ```", "if x:\n    y = 1"),
    "a deep list": ("- a\n  - b\n\n    ```py\n    x = 1\n    ```", "x = 1"),
    "tags of XML": ("<answer>\n```python\nx = 1\n```\n</answer>", "x = 1"),
    "a shell block before": ("```bash\npython a.py\n```\n```python\nx = 1\n```", "x = 1"),
    "a shell block before, no tag": ("```sh\nls -l\n```\n```\nx = 1\n```", "x = 1"),
    "output before": ("```\n5\n```\n```python\nx = 1\n```", "x = 1"),
    "two programs": ("```\nx = 1\n```\n```python\nprint(x)\n```", "x = 1"),
    "an empty one before": ("```python\n```\n```python\nx = 1\n```", "x = 1"),
    "a docstring's example": (
        '```python\ndef f():\n    """\n    ```\n    f()\n    ```\n    """\n```',
        'def f():\n    """\n    ```\n    f()\n    ```\n    """',
    ),
    "fences in a text": ("```python\nx = '```'\ny = f'{x}```'\n```", "x = '```'\ny = f'{x}```'"),
    "a doubled opening": ("```\n```python\nx = 1\n```\nDone.", "x = 1"),
    "an opening behind prose": ("So: ```python\nx = 1\n```\nDone.", "x = 1"),
    "a closing behind code": ("```python\nx = 1```", "x = 1"),
    "a closing behind code, prose": ("```python\nx = 1```\nDone.", "x = 1"),
    "the first line behind the fence": ("```def f():\n    return 1\n```", "def f():\n    return 1"),
    "unindented in a list": ("1. ```python\nif x:\n    y = 1\n```\nDone.", "if x:\n    y = 1"),
    "reasoning": ("<think>\n```python\ny\n```\n</think>\n```python\nx = 1\n```", "x = 1"),
    "the template began the reasoning": (
        "Try\n```python\ny = 2\n```\n</think>\n\n```python\nx = 1\n```",
        "x = 1",
    ),
    "reasoning in a line": ("<think>y</think>```python\nx = 1\n```", "x = 1"),
    "a tag in a text": ('```python\nx = "</think>"\n```', 'x = "</think>"'),
}
WHOLE = {
    "nothing fenced": "x = 1\n",
    "fences in a text": "print('```')\n",
    "a docstring's example": 'def f():\n  """\n  ```\n  f()\n  ```\n  """\n  return 1\n',
    "a template of Markdown": 'def f(code):\n    return f"""\n```python\n{code}\n```\n"""\n',
    "prose": "I cannot do that.",
    "a closing fence only": "x = (1\n```",
}

# Pieces that make fences, tags and white space meet in every order.
texts = st.lists(
    st.sampled_from(
        ["```", "`", "python", "PyThon", "py", "\n", "\r\n", " ", "\t", "x = 1", "é", "\x1c"]
    ),
    max_size=14,
).map("".join)


@pytest.mark.parametrize(("text", "expected"), SANITIZE.values(), ids=SANITIZE)
def test_sanitize_table(text: str, expected: object) -> None:
    result = sanitize(text)
    assert result is text if expected is ORIGINAL else result == expected
    assert sanitize(result) == result


@pytest.mark.parametrize(("text", "expected"), DESANITIZE.values(), ids=DESANITIZE)
def test_desanitize_table(text: str, expected: object) -> None:
    result = desanitize(text)
    assert result is text if expected is ORIGINAL else result == expected


@given(texts)
@example("```python```python```")
@example("``````x```")
def test_both_equal_the_regular_expressions(text: str) -> None:
    flags = re.DOTALL | re.IGNORECASE
    opened = re.search(r"```(?:python)?\s*(.*?)\s*(?:```|\Z)", text, flags)
    code = opened.group(1) if opened else ""
    assert sanitize(text) == (f"```python\n{code}\n```" if code else text)
    closed = re.search(r"```(?:python)?(.*?)```", text, flags)
    assert desanitize(text) == (closed.group(1).strip() if closed else text)


@pytest.mark.parametrize(("text", "program"), PROGRAMS.values(), ids=PROGRAMS)
def test_a_program_that_runs_is_handed_in_as_it_runs(text: str, program: str) -> None:
    assert extract_code(text) == program
    assert sanitized_answer(text) == fence_code(program)


@pytest.mark.parametrize("text", WHOLE.values(), ids=WHOLE)
def test_a_text_without_a_block_is_handed_in_as_a_whole(text: str) -> None:
    assert extract_code(text) == text
    assert sanitized_answer(text) == text


@given(texts)
def test_what_is_shown_is_what_is_judged(text: str) -> None:
    shown = sanitized_answer(text)
    assert sanitized_answer(shown) == shown
    if shown != without_reasoning(text):
        assert shown == fence_code(extract_code(text))
        assert extract_code(shown) == extract_code(text)


@given(texts)
def test_canonical_blocks_are_read_as_ctrl_reads_them(text: str) -> None:
    canonical = sanitize(text)
    if canonical.startswith("```python\n") and not canonical[10:].startswith(("`", " ", "\t")):
        assert sanitized_answer(canonical).replace("\r\n", "\n") == canonical.replace("\r\n", "\n")


def test_reasoning_without_an_end_has_no_answer_yet() -> None:
    assert extract_code("<think>\n```python\nx = 1\n```\n") == ""
    assert extract_code("<think>so</think>\nx = 1") == "x = 1"
    assert extract_code("x = '<think>'") == "x = '<think>'"


@pytest.mark.parametrize("language", ["cpp", "bash", "go"])
def test_other_languages_take_their_own_block(language: str) -> None:
    text = f"```python\nx = 1\n```\n~~~{language}\n  1;\n~~~\n```{language}\n2;\n```"
    assert extract_code(text, language) == "  1;"


def test_a_block_is_fenced_by_more_than_it_holds() -> None:
    code = 'x = """\n````\n"""'
    assert fence_code(code) == f"`````python\n{code}\n`````"
    assert extract_code(fence_code(code)) == code


@given(texts)
def test_sanitize_is_idempotent(text: str) -> None:
    assert sanitize(sanitize(text)) == sanitize(text)


@given(
    # A byte order mark at the beginning is no code.
    st.text(st.characters(exclude_characters="\ufeff")).filter(
        lambda code: "```" not in code and code.strip() and code.strip()[-1] != "`"
    )
)
def test_round_trip_gives_the_stripped_code(code: str) -> None:
    assert desanitize(fence_code(code)) == code.strip()
    code = code.replace("\r\n", "\n")  # as Python reads it
    assert extract_code(f"Sure.\n{fence_code(code)}") == code.strip()
    assert extract_code(f"```python\n{code}") == code.strip()


def test_extract_code_takes_unfenced_text_whole() -> None:
    assert extract_code("x = 1\n") == "x = 1\n"


def test_long_runs_of_white_space_take_linear_time() -> None:
    # A quadratic search would need minutes for this.
    blank = "\n" * 300_000
    assert (
        sanitize(f"```python{blank}x = 1{blank}y = 2{blank}")
        == f"```python\nx = 1{blank}y = 2\n```"
    )
