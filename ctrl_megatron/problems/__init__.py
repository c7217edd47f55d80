"""How the tests of programming problems are written and when outputs are equal. Runs nothing."""
