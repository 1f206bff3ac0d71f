"""Number formats: what a packed weight is, and how it lies in memory. Called by all other layers; calls torch
alone."""
