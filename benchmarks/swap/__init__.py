"""Scripts for TRL as people write them; `benchmarks.trl_swap` runs each as it is and with one import changed."""
