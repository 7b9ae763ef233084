"""What spark-submit runs: the commands of `gateway pipeline`, on the cluster that was submitted to.

    spark-submit --master k8s://... --py-files gateway-0.1.0-py3-none-any.whl submit.py archive --to s3a://...

Python on the driver and the executors needs the gateway's dependencies and those of its extra `pipeline`;
the image of the Dockerfile beside this file has all of it, and needs no --py-files.
"""

import sys

from gateway.cli import main

sys.argv.insert(1, "pipeline")
main()
