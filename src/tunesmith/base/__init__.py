"""The parts that every other part uses: errors, spans, seeds, records, the schema of recipes, run folders."""
