"""Self-contained HTML reports from stored facts. Loads no torch and no numpy."""
