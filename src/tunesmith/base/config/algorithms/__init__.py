"""The facts of each algorithm without its code: settings, recipe, rules and `SPEC`, a file each."""
