"""Records of the steps of a run: metrics, examples, profiles and dumps."""
