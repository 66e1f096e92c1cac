package io.github.flinkishspark.shim;

import java.io.BufferedOutputStream;
import java.io.FileNotFoundException;
import java.io.IOException;
import java.io.OutputStream;
import java.nio.file.Files;
import java.nio.file.NoSuchFileException;
import java.nio.file.StandardCopyOption;
import java.nio.file.attribute.PosixFilePermission;
import java.nio.file.attribute.PosixFilePermissions;
import java.util.Set;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FSDataOutputStream;
import org.apache.hadoop.fs.FileAlreadyExistsException;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.permission.FsPermission;
import org.apache.spark.sql.execution.streaming.checkpointing.FileContextBasedCheckpointFileManager;

/**
 * Writes the small files of a query's checkpoint (offsets, commits, the state's change logs) on a local disk without starting
 * a process for each.
 *
 * <p>Hadoop's local file system sets the permissions of every new file by running {@code chmod} where its native library is
 * missing, as it is in PySpark: some 20 ms for each file, twice or more in a micro-batch. Here the same permissions are set by a
 * system call. Paths of other file systems are left to the parent.
 *
 * <p>Spark makes one per log and per state store, by the setting {@code spark.sql.streaming.checkpointFileManagerClass}; tasks
 * use it on executors. Nothing is kept in memory: what survives a crash are temporary files, whose names begin with a dot, and
 * whole files. Like Spark's own it does not sync; the protocol's own files are synced elsewhere.
 */
public final class LocalCheckpointFiles extends FileContextBasedCheckpointFileManager {
  private static final int BUFFER_BYTES = 16 * 1024;

  private final boolean isLocalDisk;
  private final Set<PosixFilePermission> permissions;

  /** The constructor that Spark calls. */
  public LocalCheckpointFiles(Path path, Configuration conf) {
    super(path, conf);
    this.isLocalDisk = "file".equals(fc().makeQualified(path).toUri().getScheme());
    this.permissions = permissions(FsPermission.getFileDefault().applyUMask(FsPermission.getUMask(conf)));
  }

  /** Fails where the folder is missing: an owner whose folder was renamed by a newer one must not make it again. */
  @Override
  public FSDataOutputStream createTempFile(Path path) {
    if (!isLocalDisk) {
      return super.createTempFile(path);
    }
    try {
      java.nio.file.Path file = onDisk(path);
      OutputStream out = Files.newOutputStream(file);
      try {
        if (file.getFileSystem().supportedFileAttributeViews().contains("posix")) {
          Files.setPosixFilePermissions(file, permissions);
        }
      } catch (IOException | RuntimeException e) {
        out.close();
        throw e;
      }
      return new FSDataOutputStream(new BufferedOutputStream(out, BUFFER_BYTES), null);
    } catch (NoSuchFileException e) {
      throw asIs(new FileNotFoundException("the folder of " + path + " does not exist"));
    } catch (IOException e) {
      throw asIs(e);
    }
  }

  /** Without {@code overwrite} the target appears by a hard link, which of two writers lets one through; a rename would not. */
  @Override
  public void renameTempFile(Path from, Path to, boolean overwrite) {
    if (!isLocalDisk || !appeared(from, to, overwrite)) {
      super.renameTempFile(from, to, overwrite);
    }
  }

  /** Whether the target is there; false if this disk cannot do it so: then at most an old checksum is gone. */
  private static boolean appeared(Path from, Path to, boolean overwrite) {
    try {
      // Of an entry that Hadoop wrote there before, by a start without this class: it would not fit the new content.
      Files.deleteIfExists(onDisk(new Path(to.getParent(), "." + to.getName() + ".crc")));
      if (overwrite) {
        Files.move(onDisk(from), onDisk(to), StandardCopyOption.ATOMIC_MOVE);
        return true;
      }
      Files.createLink(onDisk(to), onDisk(from));
    } catch (java.nio.file.FileAlreadyExistsException e) {
      throw asIs(new FileAlreadyExistsException("rename destination " + to + " already exists"));
    } catch (IOException | UnsupportedOperationException e) {
      return false;
    }
    try {
      Files.delete(onDisk(from));
    } catch (IOException e) {
      // The target is there, which is what counts; a name that begins with a dot is read by nobody.
    }
    return true;
  }

  private static java.nio.file.Path onDisk(Path path) {
    return java.nio.file.Path.of(path.toUri().getPath());
  }

  private static Set<PosixFilePermission> permissions(FsPermission wanted) {
    String text = wanted.getUserAction().SYMBOL + wanted.getGroupAction().SYMBOL + wanted.getOtherAction().SYMBOL;
    return PosixFilePermissions.fromString(text);
  }

  /** Scala declares no checked exceptions, and its callers expect these as they are. */
  @SuppressWarnings("unchecked")
  private static <E extends Throwable> RuntimeException asIs(Throwable error) throws E {
    throw (E) error;
  }
}
