"""One folder per model family, each with the same file names; `registry` is the only list of them."""
