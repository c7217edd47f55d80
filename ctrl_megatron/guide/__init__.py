"""Names and helpers of siiRL's guide that no run of this package needs."""
