"""From files to rows, from text to tokens, from rows to an order and a share for everyone."""
