"""From files, shards or formulas to the batches of a step: the same ones whoever reads them, and whenever."""
