"""Results as files, plots and one page."""
