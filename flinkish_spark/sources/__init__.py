"""One file per input system; `base` is the contract."""
