"""Number formats of expert weights and their layouts in memory, in plain torch; imports nothing else of the package.
`weight` has the packed weight, `nvfp4` and `mxfp4` arithmetic, `layouts` and `registry` what there is by name.
"""
