"""Program for spark-submit: it runs the commands of `gateway pipeline` on a cluster.

    spark-submit --master k8s://... submit.py archive --to s3a://...

The image of the Dockerfile beside this file has all dependencies; for other clusters `gateway pipeline
bundle` writes a program like this one, and the files that it needs.
"""

import sys

from gateway.cli import main

sys.argv.insert(1, "pipeline")
main()
