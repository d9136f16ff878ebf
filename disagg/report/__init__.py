"""Pictures of what benchmarks measured. Needs the extra `disagg[plot]`."""
