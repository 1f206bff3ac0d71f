"""Models of other libraries on the package's operators. Called by users and quantization; each folder imports its
library."""
