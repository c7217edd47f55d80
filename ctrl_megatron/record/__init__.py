"""What a run writes about its steps: metrics, examples, profiles and dumps."""
