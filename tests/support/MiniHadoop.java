import java.io.File;
import java.nio.file.Files;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.hdfs.HdfsConfiguration;
import org.apache.hadoop.hdfs.MiniDFSCluster;

/**
 * HDFS in one process, on loopback, until it is killed.
 *
 * <p>Arguments: a folder for all of it, the port of the NameNode. The file {@code ready} is there when it answers.
 */
public final class MiniHadoop {
  public static void main(String[] args) throws Exception {
    File folder = new File(args[0]);
    Configuration conf = new HdfsConfiguration();
    conf.set(MiniDFSCluster.HDFS_MINIDFS_BASEDIR, new File(folder, "dfs").getPath());
    // With one replica a file is hardly ever closed at once: its DataNode's report comes behind the client's question, which is
    // asked again after half a second.
    conf.set("dfs.replication", "2");
    int port = Integer.parseInt(args[1]);
    MiniDFSCluster dfs = new MiniDFSCluster.Builder(conf).numDataNodes(2).nameNodePort(port).build();
    dfs.waitActive();
    Files.createFile(folder.toPath().resolve("ready"));
    Thread.currentThread().join();
  }
}
