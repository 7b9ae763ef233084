"""Jobs over the journal, one module each; `run` has a Spark session and the job's options as parameters.

The commands in `gateway/cli/pipeline` only parse arguments and print the result of `run`.
"""
