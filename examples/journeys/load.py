"""Ask an exported model a question: ``python examples/journeys/load.py DIR "QUESTION"``."""

from __future__ import annotations

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer


def main(directory: str, question: str) -> None:
    """Print the model's greedy answer of at most 64 tokens."""
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=False)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**asked, do_sample=False, max_new_tokens=64)
    print(tokenizer.decode(answer[0, asked["input_ids"].shape[1] :], skip_special_tokens=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
