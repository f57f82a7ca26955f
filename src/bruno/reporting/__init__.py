"""Results as files, plots and one page. Drawing libraries are imported on first use."""
