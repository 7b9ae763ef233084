"""What spark-submit runs: the commands of `gateway pipeline`, on the cluster that was submitted to.

    spark-submit --master k8s://... submit.py archive --to s3a://...

The image of the Dockerfile beside this file has all that it needs; for other clusters `gateway pipeline
bundle` writes a program like this one, and what goes along with it.
"""

import sys

from gateway.cli import main

sys.argv.insert(1, "pipeline")
main()
