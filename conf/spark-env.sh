# Spark's scripts read this file for the JVM that they start. Its child processes inherit the settings; the Python of the
# job does not.

# A user who can write to a Unix socket of Spark can run code in its Python workers. Only the owner may write.
umask go-w

# The Python process that plans a streaming query imports numpy with Arrow. numpy's BLAS starts a thread for each core,
# and these threads keep all cores busy for 0.1 s. Spark sets the number for workers itself (spark.task.cpus).
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
