"""What is done with the journal, a module for each job: `run` takes a session and the job's options.

The commands in gateway/cli/pipeline only read their arguments and print what `run` returns.
"""
