"""The page: a run explained in one file that opens in a browser, from a mail attachment as well as from a disk."""
