"""The benchmarks: `python -m benchmarks COMMAND --help`, from the root of a checkout.
Called by __main__.py; calls nothing. suites/ has a module per command, harness/ what they share, results/ their output.
"""
