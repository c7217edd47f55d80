# For pyright, which else reads the modules of all of transformers' models to check a few lines of
# ours: twenty seconds of a core.
from typing import Any

def __getattr__(name: str) -> Any: ...
