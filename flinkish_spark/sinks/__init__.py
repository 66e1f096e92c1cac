"""One file per output system; `base` is the contract."""
