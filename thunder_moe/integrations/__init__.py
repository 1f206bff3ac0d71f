"""Models of other libraries on the package's operators. Called by users and quantize; each file imports its library."""
