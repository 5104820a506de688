# Read by Spark's own scripts for the JVM that they start, and so for all that it starts; not for the job's Python.

# Whoever may write to a Unix socket of Spark's may have its Python workers run what he likes: that is to be the user.
umask go-w

# The Python process that plans a streaming query loads numpy with Arrow, whose BLAS starts a thread for each core of the
# machine, which keep all of them busy for a tenth of a second. Workers have what Spark gives them (spark.task.cpus).
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
