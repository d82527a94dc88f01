"""Speed: what a scan, a model, a training step and a loader take, beside what else does the job."""
