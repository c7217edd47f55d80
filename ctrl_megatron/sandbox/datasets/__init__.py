"""Data set kinds: how each writes down the tests of a problem. Reading only; nothing runs here."""
