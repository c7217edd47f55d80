"""Finding the program in a completion."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctrl_megatron import prompts
from ctrl_megatron.sandbox.languages import PYTHON, extract_program


@pytest.mark.parametrize(
    ("text", "code", "kind"),
    [
        ("a\n```python\nx = 1\n```\nb", "x = 1\n", "fenced"),
        ("```py\nx = 1\n```\n```python\ny = 1\n```", "x = 1\n", "fenced"),
        ("```cpp\nint x;\n```\n```Python3\nx = 1\n```", "x = 1\n", "fenced"),
        ("```\nx = 1\n```", "x = 1\n", "fenced"),
        ("```cpp\nint x;\n```", "int x;\n", "fenced"),
        ("  ```python\n  x = 1\n  ```", "x = 1\n", "fenced"),
        ("~~~python\nx = 1\n~~~", "x = 1\n", "fenced"),
        ("```bash\nls -l\n```\n```\nx = 1\n```", "x = 1\n", "fenced"),
        ("<think>\n```python\ny\n```\n</think>\nx = 1", "x = 1", "heuristic"),
        ("<think>\n```python\nx = 1\n```\n", "", "none"),
        ("```python\nx = 1```", "x = 1", "incomplete_fenced"),
        ("```python\nx = 1\n", "x = 1\n", "incomplete_fenced"),
        ("```python\nx = '```'\n```", "x = '```'\n", "fenced"),
        ("```python x = 1```", "", "none"),
        ("```python\n```", "", "fenced"),
        ("def f():\n    return 1", "def f():\n    return 1", "heuristic"),
        ("Sure, here it is.\n\nimport os\nx = 1", "import os\nx = 1", "heuristic"),
        ("def f(): return 1\n\nThis returns one.", "def f(): return 1\n", "heuristic"),
        ("I cannot do that.", "", "none"),
        ("", "", "none"),
        ("```python\r\nx = 1\r\n```", "x = 1\n", "fenced"),
    ],
)
def test_extraction(text: str, code: str, kind: str) -> None:
    found = extract_program(text, PYTHON)
    assert (found.code, found.found_by) == (code, kind)


@given(st.text(st.sampled_from("`\npython xdef():= 1\x00\r\t"), max_size=60))
def test_any_text_gives_an_answer(text: str) -> None:
    found = extract_program(text, PYTHON)
    assert (found.found_by == "none") <= (found.code == "")


@given(
    st.text(st.characters(exclude_characters="`\r", exclude_categories=["Cs"])).filter(
        lambda code: not code[:1].isspace()
    )
)
def test_a_fenced_program_comes_back_exactly(code: str) -> None:
    assert extract_program(f"text\n```python\n{code}\n```\nmore", PYTHON).code == code + "\n"


@given(
    st.lists(
        st.sampled_from(
            [
                "```",
                "~~~",
                "````",
                "```python",
                "```sh",
                "x = 1",
                "ls -l",
                "",
                "  ",
                "> ",
                "- y = 2",
            ]
        ),
        max_size=9,
    ).map("\n".join)
)
def test_the_trainer_finds_the_same_program(text: str) -> None:
    found = extract_program(text, PYTHON)
    if found.found_by == "fenced":
        assert prompts.extract_code(text) == found.code.strip()
        judged = extract_program(prompts.fence_code(prompts.extract_code(text)), PYTHON)
        assert (judged.code.strip(), judged.found_by) == (found.code.strip(), "fenced")
