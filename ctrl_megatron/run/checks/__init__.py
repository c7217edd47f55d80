"""Everything that is checked before a run starts and that the keys alone do not tell."""
