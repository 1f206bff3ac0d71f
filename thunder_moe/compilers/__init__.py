"""The compile-time rewrite. Called by the package's users through moe_executor; calls ops and Thunder."""
