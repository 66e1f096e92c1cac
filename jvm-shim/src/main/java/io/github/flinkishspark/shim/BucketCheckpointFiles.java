package io.github.flinkishspark.shim;

import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.util.Arrays;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FSDataOutputStream;
import org.apache.hadoop.fs.FSDataOutputStreamBuilder;
import org.apache.hadoop.fs.FileAlreadyExistsException;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.spark.sql.execution.streaming.checkpointing.CheckpointFileManager;
import org.apache.spark.sql.execution.streaming.checkpointing.FileContextBasedCheckpointFileManager;

/**
 * Writes the small files of a query's checkpoint into a bucket with one request each, where Spark's own copies and deletes.
 *
 * <p>An upload appears when it is closed, whole, so nothing has to be renamed. What must not be there yet (an entry of a log) is
 * written only if the key is free, which of two writers lets one through; that takes a file system with conditional creates, as
 * S3A of Hadoop 3.4.2 and later is. Others are left to the parent.
 *
 * <p>Spark makes one per log and per state store, by the setting {@code spark.sql.streaming.checkpointFileManagerClass}; tasks
 * use it on executors. A crash leaves nothing but an upload that was never completed.
 */
public final class BucketCheckpointFiles extends FileContextBasedCheckpointFileManager {
  private static final String CONDITIONAL = "fs.option.create.conditional.overwrite";

  private final FileSystem files;
  private final boolean isConditional;

  /** The constructor that Spark calls. */
  public BucketCheckpointFiles(Path path, Configuration conf) throws IOException {
    super(path, conf);
    this.files = path.getFileSystem(conf);
    this.isConditional = files.hasPathCapability(path, CONDITIONAL);
  }

  @Override
  public CheckpointFileManager.CancellableFSDataOutputStream createAtomic(Path path, boolean overwrite) {
    if (!isConditional) {
      return super.createAtomic(path, overwrite);
    }
    try {
      return overwrite ? new Replacing(files.create(path, true)) : new IfAbsent(new ByteArrayOutputStream(), path);
    } catch (IOException e) {
      throw asIs(e);
    }
  }

  /** Replaces what is there when it is closed. */
  private static final class Replacing extends CheckpointFileManager.CancellableFSDataOutputStream {
    private final FSDataOutputStream upload;
    private boolean isEnded;

    Replacing(FSDataOutputStream upload) {
      super(upload);
      this.upload = upload;
    }

    @Override
    public void close() throws IOException {
      if (!isEnded) {
        isEnded = true;
        super.close();
      }
    }

    @Override
    public void cancel() {
      if (!isEnded) {
        isEnded = true;
        upload.abort();
      }
    }
  }

  /** An entry of a log: in memory until it is closed, then written only if the key is free. */
  private final class IfAbsent extends CheckpointFileManager.CancellableFSDataOutputStream {
    private final ByteArrayOutputStream content;
    private final Path path;
    private boolean isEnded;

    IfAbsent(ByteArrayOutputStream content, Path path) {
      super(content);
      this.content = content;
      this.path = path;
    }

    @Override
    public void close() throws IOException {
      if (isEnded) {
        return;
      }
      isEnded = true;
      byte[] wanted = content.toByteArray();
      try (OutputStream out = ifAbsent(path)) {
        out.write(wanted);
      } catch (IOException refused) {
        // An answer may have been lost, and the client have asked again and found its own: what is there decides.
        if (!files.exists(path)) {
          throw refused;
        }
        try (InputStream in = files.open(path)) {
          if (!Arrays.equals(in.readAllBytes(), wanted)) {
            throw (IOException) new FileAlreadyExistsException(path + " already exists").initCause(refused);
          }
        }
      }
    }

    @Override
    public void cancel() {
      isEnded = true;
    }
  }

  @SuppressWarnings("unchecked")
  private FSDataOutputStream ifAbsent(Path path) throws IOException {
    FSDataOutputStreamBuilder<FSDataOutputStream, ?> builder = files.createFile(path);
    builder.recursive();
    builder.overwrite(false);
    builder.must(CONDITIONAL, true);
    return builder.build();
  }

  /** Scala declares no checked exceptions, and its callers expect these as they are. */
  @SuppressWarnings("unchecked")
  private static <E extends Throwable> RuntimeException asIs(Throwable error) throws E {
    throw (E) error;
  }
}
